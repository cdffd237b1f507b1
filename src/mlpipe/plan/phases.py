"""Which stages belong to which of the phases in which whoever approves a model sees a run."""

from __future__ import annotations

from graphlib import TopologicalSorter

from mlpipe.kinds import PHASES, Phase
from mlpipe.spec.model import Pipeline


def stages_of(pipeline: Pipeline, phase: Phase) -> list[str]:
    """Names of its stages, each after what it needs. A stage belongs to the phase of its kind, or to a later
    one if something that it needs does; so no phase needs a later one."""
    stages = {stage.name: stage for stage in pipeline.stages}
    place: dict[str, int] = {}
    for name in TopologicalSorter({stage.name: stage.needs for stage in pipeline.stages}).static_order():
        own = PHASES.index(stages[name].kind.phase)
        place[name] = max([own, *(place[need] for need in stages[name].needs)])
    return [name for name, number in place.items() if PHASES[number] == phase]
