"""The three phases in which whoever approves a model sees a run: train, evaluate, promote."""

from __future__ import annotations

from graphlib import TopologicalSorter
from typing import Literal, get_args

from mlpipe.spec.model import Pipeline

Phase = Literal["train", "evaluate", "promote"]
PHASES: tuple[Phase, ...] = get_args(Phase)


def stages_of(pipeline: Pipeline, phase: Phase) -> list[str]:
    """Names of its stages, each after what it needs. A stage belongs to the phase of its kind (a command: to
    the first), or to a later one if something that it needs does; so no phase needs a later one."""
    stages = {stage.name: stage for stage in pipeline.stages}
    found: dict[str, int] = {}
    for name in TopologicalSorter({stage.name: stage.needs for stage in pipeline.stages}).static_order():
        kind = stages[name].kind
        own = 0 if kind == "command" else PHASES.index(kind)
        found[name] = max([own, *(found[need] for need in stages[name].needs)])
    return [name for name, number in found.items() if PHASES[number] == phase]
