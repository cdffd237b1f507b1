"""How long the trainings of a pipeline take on given hardware, and what they cost, as the planner sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlpipe.plan.candidates import pick
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.training import shape_of, trainings
from mlpipe.spec.model import Pipeline


@dataclass(frozen=True)
class Lasting:
    """`seconds`: from the first training's start, each after those that it needs, without the stages between
    them. None: of a training nobody knows it, or the price."""

    seconds: float | None = None
    usd: float | None = None


def lasting(
    pipeline: Pipeline, hardware: Callable[[Pipeline, str], Hardware], only: str | None = None
) -> Lasting:
    """`hardware`: of a stage; `only`: that stage alone. Raises PlanError."""
    hours: dict[str, float | None] = {}
    usd: list[float | None] = []
    for name, spec in trainings(pipeline).items():
        if only in (None, name):
            best, _ = pick(spec, shape_of(spec, {}), hardware(pipeline, name))
            hours[name] = best.hours
            usd.append(best.usd)
    done: dict[str, float] = {}

    def done_hours(name: str) -> float:
        if name not in done:
            before = max(map(done_hours, pipeline.stage(name).needs), default=0.0)
            done[name] = before + (hours.get(name) or 0.0)
        return done[name]

    if None in hours.values():
        return Lasting()
    seconds = 3600 * max((done_hours(stage.name) for stage in pipeline.stages), default=0.0)
    known = [each for each in usd if each is not None]
    return Lasting(seconds, sum(known) if known and len(known) == len(usd) else None)
