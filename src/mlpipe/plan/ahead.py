"""The plan of a stage before anything has run, and every other way to do it. Apart from `submit`, so that a
command which only looks ahead imports no store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlpipe._core.errors import PlanError
from mlpipe.kinds.train.spec import OwnModel
from mlpipe.plan.build import Start, build_plan, stage_hardware, stage_resources
from mlpipe.plan.plan import Plan
from mlpipe.plan.training import compare, trainings
from mlpipe.spec.model import Pipeline

if TYPE_CHECKING:
    from mlpipe.plan.choose import Candidate
    from mlpipe.plan.hardware import Hardware
    from mlpipe.plan.shapes.traced import Traced


def plan_ahead(
    pipeline: Pipeline,
    stage_name: str,
    store_url: str,
    run_id: str,
    *,
    cluster: bool = False,
    traced: Traced | None = None,
) -> Plan:
    """The plan as far as it is known before anything has run, for this machine or for a cluster's. Raises
    PlanError, with the stage's place in the file where it concerns all of it."""
    with _placed(pipeline, stage_name):
        hardware = stage_hardware(pipeline, stage_name, cluster=cluster)
        return build_plan(pipeline, stage_name, Start(run_id, 1, store_url, resume=True), hardware, traced)


@contextmanager
def _placed(pipeline: Pipeline, stage_name: str) -> Iterator[None]:
    try:
        yield
    except PlanError as error:
        if error.where in (None, f"stage {stage_name!r}"):
            place = pipeline.place(stage_name)
            error.where = error.where if place is None else str(place)
        raise


@dataclass(frozen=True)
class StagePlan:
    """What a stage will do. `plan`: what plan.json will say. `candidates`: every way to train it, the best
    first, with its bytes, seconds and cost, and why not; empty for a stage that does not train. `traced`: the
    figures of a user's own model."""

    stage: str
    plan: Plan
    candidates: list[Candidate]
    hardware: Hardware
    traced: Traced | None = None

    def __str__(self) -> str:
        return f"{self.stage} ({self.plan.kind}): {self.plan.work.summary}"


def named(pipeline: Pipeline, stage: str | None, *, where: str) -> list[str]:
    """All stages, or that one. Raises PlanError."""
    names = [each.name for each in pipeline.stages]
    if stage is not None and stage not in names:
        raise PlanError(
            f"the pipeline has no stage {stage!r}", where=where, hint=f"it has {', '.join(names)}"
        )
    return names if stage is None else [stage]


def plan_stage(
    pipeline: Pipeline,
    name: str,
    store_url: str,
    trace: Callable[[Plan], Traced | None] | None = None,
    hardware_of: Callable[[Pipeline, str], Hardware] = stage_hardware,
) -> StagePlan:
    """`trace`: sizes a user's own model, and what it finds is planned with. `hardware_of`: a backend's, of
    pipeline and stage; else this machine's. Raises PlanError."""
    start = Start(f"{pipeline.name[:40]}-RUN", 1, store_url, resume=True)
    with _placed(pipeline, name):
        hardware = hardware_of(pipeline, name)
        made = build_plan(pipeline, name, start, hardware)
        shape = trace(made) if trace is not None else None
        if shape is not None:
            made = build_plan(pipeline, name, start, hardware, shape)
    return StagePlan(name, made, compare(pipeline, name, hardware, traced=shape), hardware, shape)


def predicted_here(pipeline: Pipeline) -> list[str]:
    """Stages whose steps are predicted by figures of this machine: trainings of models of ours on CPUs."""
    names = []
    for name, training in trainings(pipeline).items():
        resources = stage_resources(pipeline, pipeline.stage(name))
        elsewhere = resources is not None and (resources.gpus_per_node or resources.hardware)
        if not elsewhere and not isinstance(training.model, OwnModel):
            names.append(name)
    return names
