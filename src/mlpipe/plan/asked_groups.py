"""`mlpipe plan --groups 2xH100-80GB,4xA100-40GB`: what classes of the catalogue would be worth together."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mlpipe._core.errors import PlanError
from mlpipe.kinds.train.spec import OwnModel
from mlpipe.plan.groups import MixedPlan, deal
from mlpipe.plan.hardware import GPUS, Hardware, together
from mlpipe.plan.training import shape_of, training_of

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced
    from mlpipe.spec.model import Pipeline

_GROUP = re.compile(r"\s*([1-9][0-9]{0,4})\s*x\s*([A-Za-z0-9._-]+)\s*")


def parse_groups(text: str) -> list[tuple[int, str]]:
    """`2xH100-80GB,4xA100-40GB`: nodes of each, and their GPUs. Raises PlanError."""
    found = [_GROUP.fullmatch(part) for part in text.split(",")]
    if len(found) < 2 or not all(found):
        raise PlanError(
            f"{text!r} names no groups of nodes", where="--groups", hint="write like 2xH100-80GB,4xA100-40GB"
        )
    groups = [(int(one[1]), one[2]) for one in found if one is not None]
    for _, gpu in groups:
        if gpu not in GPUS:
            raise PlanError(
                f"the catalogue has no GPU {gpu!r}", where="--groups", hint=f"it has {', '.join(GPUS)}"
            )
    return groups


def plan_groups(
    pipeline: Pipeline, stage_name: str, hardware: Hardware, groups: str, traced: Traced | None = None
) -> MixedPlan:
    """The stage's training on groups of nodes, each with as many GPUs as `hardware` has. Raises PlanError."""
    if hardware.device != "cuda":
        raise PlanError(
            "groups are of nodes with GPUs", where="--groups", hint="write resources.gpus_per_node"
        )
    spec = training_of(pipeline, stage_name)
    shape = shape_of(spec, {}, traced)
    if shape is None:
        if isinstance(spec.model, OwnModel):
            raise PlanError("the size of your own model is not known", where="--groups", hint="add --trace")
        raise PlanError("the weights are not there before another stage has made them", where="--groups")
    classes = [_of_catalogue(hardware, number, name) for number, name in parse_groups(groups)]
    spec = spec.model_copy(update={"strategy": "auto", "mesh": None})
    return deal(spec, shape, together(classes), where="--groups")[1]


def _of_catalogue(hardware: Hardware, num_nodes: int, name: str) -> Hardware:
    gpu = GPUS[name]
    return hardware._replace(
        num_nodes=num_nodes,
        memory_bytes=gpu.memory_bytes,
        name=name,
        peak_flops=gpu.speed.peak_flops,
        speed=gpu.speed,
        price_usd_per_device_hour=gpu.price_usd_per_hour,
        groups=(),
    )
