"""A smoke test of a whole pipeline: the same stages with the same code, on few workers, for few steps, with
the smallest shapes. It is made of overrides as `--set` takes them, so that a run says what it was.

What shrinks a stage, its kind knows (`SpecPart.smoke`); what is the user's own (commands, models, data sets)
stays as it is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mlpipe.spec.model import Pipeline, Resources, Stage
from mlpipe.spec.part import spec_part


@dataclass(frozen=True)
class Smoke:
    """`ranks`: workers of each stage that has any, on one node; nodes of a command on
    several. `steps`: of each training. `tiny`: the smallest shapes and data."""

    ranks: int | None = None
    steps: int | None = None
    tiny: bool = False


def overrides(pipeline: Pipeline, smoke: Smoke, *, num_gpus: int) -> list[str]:
    """`num_gpus`: of this machine. Workers that would each need one and have none run on the CPU."""
    changes: list[str] = []
    for stage in pipeline.stages:
        resources = stage.resources
        if smoke.ranks is not None and stage.kind.runs == "workers" and _has_own(stage):
            fewer = _few(resources, smoke.ranks, num_gpus)
            changes.append(f"stages.{stage.name}.resources={json.dumps(fewer)}")
        elif smoke.ranks is not None and stage.kind.runs == "command" and resources is not None:
            fitting = _fitting(resources, smoke.ranks, num_gpus)
            if fitting is not None:
                changes.append(f"stages.{stage.name}.resources={json.dumps(fitting)}")
        num_workers = smoke.ranks or _num_workers(resources)
        shrunk = spec_part(stage.kind).smoke(stage.work, smoke, num_workers)
        for key, value in shrunk.items():
            path = ".".join(filter(None, (stage.kind.name, key)))
            changes.append(f"stages.{stage.name}.{path}={json.dumps(value)}")
    if (sweep := pipeline.sweep) is not None and sweep.promote:
        changes.append("sweep.promote=null")
    return changes


def _has_own(stage: Stage) -> bool:
    """Whether the workers are its own, not those of the stage that it is about."""
    borrows = any(reference.lends for reference in spec_part(stage.kind).references)
    return stage.resources is not None or not borrows


def _few(resources: Resources | None, ranks: int, num_gpus: int) -> dict[str, Any]:
    if resources is None or not resources.gpus_per_node or num_gpus < ranks:
        return {"workers_per_node": ranks}
    kept = resources.model_dump(mode="json", include={"gpu", "device"}, exclude_none=True)
    return {"gpus_per_node": ranks, **kept}


def _fitting(resources: Resources, ranks: int, num_gpus: int) -> dict[str, Any] | None:
    """Of a command: a gang stays one, so that its processes meet, of as few nodes as there are ranks, which
    share the GPUs here. None: it fits as it is."""
    asked, gpus = resources.gang_nodes, resources.gpus_per_node
    nodes = asked if asked == 1 else max(2, min(asked, ranks))
    each = min(gpus, num_gpus // nodes)
    if (nodes, each) == (asked, gpus):
        return None
    kept = resources.model_dump(mode="json", include={"gpu", "device"}, exclude_none=True)
    return {"nodes": nodes, **({"gpus_per_node": each, **kept} if each else {})}


def _num_workers(resources: Resources | None) -> int:
    if resources is None:
        return 1
    return resources.gang_nodes * (resources.gpus_per_node or resources.workers_per_node or 1)
