"""Stages of a pipeline by name, and those that a stage is about: `spec.part.Reference` says by which key."""

from __future__ import annotations

from mlpipe._core.errors import PlanError
from mlpipe.spec.model import Pipeline, Stage
from mlpipe.spec.part import spec_part


def stage_named(pipeline: Pipeline, name: str) -> Stage:
    """Raises PlanError where there is none."""
    try:
        return pipeline.stage(name)
    except KeyError:
        known = ", ".join(stage.name for stage in pipeline.stages)
        raise PlanError(f"no stage {name!r} in {pipeline.name!r}", hint=f"write one of {known}") from None


def find_referred_to(pipeline: Pipeline, stage: Stage, kind: str) -> Stage | None:
    """The stage of `kind` that the key of this name says, else the only one among all that `stage` needs (the
    loader has refused several)."""
    if name := getattr(stage.work, kind):
        return pipeline.stage(name)
    seen: set[str] = set()
    todo = list(stage.needs)
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo.extend(pipeline.stage(name).needs)
    return next((each for each in pipeline.stages if each.name in seen and each.kind.name == kind), None)


def stage_referred_to(pipeline: Pipeline, stage: Stage, kind: str) -> Stage:
    """As `find_referred_to`. Raises PlanError where there is none."""
    referred = find_referred_to(pipeline, stage, kind)
    if referred is None:
        raise PlanError(f"stage {stage.name!r} needs no {kind} stage", hint="add it to 'needs'")
    return referred


def lender(pipeline: Pipeline, stage: Stage) -> Stage | None:
    """Whose resources and data the stage has where it says nothing of its own, as an evaluation has those of
    its training; None: nobody's."""
    lends = (reference.kind for reference in spec_part(stage.kind).references if reference.lends)
    return next((stage_referred_to(pipeline, stage, kind) for kind in lends), None)
