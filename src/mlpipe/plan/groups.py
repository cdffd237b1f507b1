"""A training on machines that differ: `mlpipe plan --groups 2xH100-80GB,4xA100-40GB`.

Each worker has as much of a batch as it computes in the time of the others, so shares follow from predicted
speed, and micro-batches from each class's memory. Gradients are averaged among all workers over the slowest
of their networks. The trainer finds such shares by measurement, with `stragglers: move_load`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from mlpipe._core.errors import PlanError
from mlpipe.kinds.train.spec import DATA_AXES, MeshSizes, Train
from mlpipe.plan.candidates import global_batch, pick
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.shares import bounds
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.training import shape_of, training_of
from mlpipe.spec.model import Pipeline

if TYPE_CHECKING:
    from mlpipe.plan.shapes.traced import Traced

_GROUP = re.compile(r"\s*([1-9][0-9]{0,4})\s*x\s*([A-Za-z0-9._-]+)\s*")


@dataclass(frozen=True)
class GroupPlan:
    """Of the workers of one class: each has up to `sequences` of a batch, and takes `step_seconds` for them.
    `share_ratio`: of the batch, of all of them together. `usd_per_hour`: None where nobody knows the price.
    """

    gpu: str
    num_nodes: int
    num_workers: int
    sequences: int
    share_ratio: float
    micro_batch: int
    memory_bytes: int
    step_seconds: float
    usd_per_hour: float | None
    usd_per_million_tokens: float | None


@dataclass(frozen=True)
class MixedPlan:
    """`even_seconds`: of a step where all workers have equal shares."""

    strategy: str
    communication: str
    groups: tuple[GroupPlan, ...]
    step_seconds: float
    even_seconds: float
    tokens_per_second: float


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
        raise PlanError("the size of your own model is not known", where="--groups", hint="add --trace")
    parsed = parse_groups(groups)
    num_workers = [number * hardware.devices_per_node for number, _ in parsed]
    if global_batch(spec) < sum(num_workers):
        raise PlanError(
            f"{sum(num_workers)} workers share batch_size {global_batch(spec)}: some would have no sample",
            where="--groups",
            hint="fewer nodes, or a larger batch",
        )
    classes = _classes(parsed, hardware)
    found = [_picked(spec, shape, classes, name) for name in ORDER]
    plans = [_mixed(spec, classes, picked, num_workers) for picked in found if picked is not None]
    if not plans:
        raise PlanError(
            "no strategy whose workers may have unequal shares fits in the memory of each group",
            where="--groups",
            hint="plan one class alone: --nodes A..B",
        )
    return min(plans, key=lambda one: one.step_seconds)


def _classes(groups: Sequence[tuple[int, str]], hardware: Hardware) -> list[Hardware]:
    """Each as if all nodes were of it, but for the network, which is the slowest's: its workers send among
    all."""
    num_nodes = sum(number for number, _ in groups)
    slowest = min(GPUS[gpu].network_bytes_per_second for _, gpu in groups)
    found = []
    for _, name in groups:
        gpu = GPUS[name]
        speed = replace(gpu.speed, network_bytes_per_second=slowest)
        found.append(
            replace(
                hardware,
                num_nodes=num_nodes,
                memory_bytes=gpu.memory_bytes,
                name=name,
                peak_flops=gpu.speed.peak_flops,
                speed=speed,
                price_usd_per_device_hour=gpu.price_usd_per_hour,
            )
        )
    return found


def _picked(
    spec: Train, shape: ModelShape, classes: Sequence[Hardware], strategy: str
) -> list[Candidate] | None:
    """Of each class, by one strategy, with the same mesh and precision on all and equal shares; None where it
    does not go."""
    world = classes[0].world_size
    shards = "dp_shard" in DATA_AXES[strategy]
    changes = {"strategy": strategy, "communication": "resident" if shards else "auto", "stragglers": "leave"}
    if spec.precision == "auto" and not all("bf16" in one.peak_flops for one in classes):
        changes["precision"] = "fp32"
    data = {"batch_size": global_batch(spec) // world * world} | (
        {"batch_tokens": None} if hasattr(spec.data, "batch_tokens") else {}
    )
    spec = spec.model_copy(update={**changes, "data": spec.data.model_copy(update=data)})
    picked: dict[str, Candidate] = {}
    for one in sorted(classes, key=lambda one: one.memory_bytes):  # the smallest decides the mesh
        try:
            best, _ = pick(spec, shape, one)
        except PlanError:
            return None
        if not best.fits or best.seconds is None or best.mesh is None:
            return None
        picked[one.name] = best
        spec = spec.model_copy(update={"mesh": MeshSizes(**asdict(best.mesh))})
    return [picked[one.name] for one in classes]


def _mixed(
    spec: Train, classes: Sequence[Hardware], picked: Sequence[Candidate], num_workers: Sequence[int]
) -> MixedPlan:
    """What a worker computes takes its share's part of the time that it takes for an even one."""
    batch, seq_len = global_batch(spec), spec.model.seq_len
    even = batch // sum(num_workers)
    seconds = [one.seconds for one in picked if one.seconds is not None]
    exposed = max(one.total - one.compute for one in seconds)

    def takes(index: int, sequences: int) -> float:
        return seconds[index].compute * sequences / even + exposed

    speeds = [1 / seconds[index].compute for index, number in enumerate(num_workers) for _ in range(number)]
    ends = bounds(batch, len(speeds), speeds)
    counts = [stop - start for start, stop in pairwise(ends)]
    groups, shares, first = [], [], 0
    for number in num_workers:
        shares.append(counts[first : first + number])
        first += number
    step = max(takes(index, max(own)) for index, own in enumerate(shares))
    for index, (one, best, own) in enumerate(zip(classes, picked, shares, strict=True)):
        price = one.price_usd_per_device_hour
        usd = None if price is None else price * len(own)
        tokens = sum(own) * seq_len
        groups.append(
            GroupPlan(
                gpu=one.name,
                num_nodes=len(own) // one.devices_per_node,
                num_workers=len(own),
                sequences=max(own),
                share_ratio=sum(own) / batch,
                micro_batch=min(best.micro_batch or 1, max(own)),
                memory_bytes=best.memory.total if best.memory is not None else 0,
                step_seconds=takes(index, max(own)),
                usd_per_hour=usd,
                usd_per_million_tokens=None if usd is None else usd * step / 3600 / tokens * 1e6,
            )
        )
    slowest = max(takes(index, -(-batch // len(speeds))) for index in range(len(classes)))
    return MixedPlan(
        picked[0].strategy, picked[0].communication, tuple(groups), step, slowest, batch * seq_len / step
    )
