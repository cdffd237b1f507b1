"""The kinds of stages: a line each in `KINDS`, and a folder each with what the kind says in every layer.

A stage's kind is the key under which its file has it: `train: {...}`. A layer loads its own part of a kind by
`Kind.part`, and never another layer's, so that a worker meets no pydantic and a command line no torch:

    spec.py     PART, a `spec.part.SpecPart`: the keys of the file, and the rules between them   (spec)
    plan.py     PLAN, a frozen dataclass: what stands in plan.json; standard library only          (plan)
    build.py    plan(pipeline, stage, given) -> (PLAN, Launch)                                     (plan)
    report.py   section(stage: StageView) -> Html, on the report's page                            (observe)
    worker.py   run(session, PLAN, progress) -> Outcome, in each rank; of what runs in workers     (train)
    driver.py   run(store, plan, raise_if_stopped) -> its outcome in run.json; of what the driver
                itself does. `raise_if_stopped()`: for before each long call                       (submit)
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Literal, NamedTuple, get_args

Phase = Literal["train", "evaluate", "promote"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in which whoever approves a model sees a run


class Kind(NamedTuple):
    """`runs`: as ranks under torchrun ("workers"); as one process of the plan's `argv` with an output folder
    ("command"); or as store calls in the driver's own process, on every backend, where no code of a user
    runs ("driver"). `phase`: the first of `PHASES` that its stages may belong to."""

    name: str
    runs: Literal["workers", "command", "driver"]
    phase: Phase

    @property
    def has_output(self) -> bool:
        """Whether a stage has a folder that others read as `{{stages.NAME.output}}`."""
        return self.runs == "command"

    @property
    def is_training(self) -> bool:
        """Whether its ranks train."""
        return self.runs == "workers" and self.phase == "train"

    @property
    def is_evaluation(self) -> bool:
        """Whether its ranks measure a trained model."""
        return self.runs == "workers" and self.phase == "evaluate"

    @property
    def is_promotion(self) -> bool:
        """Whether it changes what others are given as a model."""
        return self.phase == "promote"

    @property
    def module(self) -> str:
        """What runs a stage by its plan.json: `python -m MODULE --plan PLAN --scratch DIR`."""
        return "mlpipe.train.launcher" if self.runs == "workers" else "mlpipe.submit.pod"

    def part(self, name: str) -> ModuleType:
        """The module of its folder that is called `name`."""
        return import_module(f"mlpipe.kinds.{self.name}.{name}")

    def __str__(self) -> str:
        return self.name


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("command", runs="command", phase="train"),
        Kind("train", runs="workers", phase="train"),
        Kind("evaluate", runs="workers", phase="evaluate"),
        Kind("promote", runs="driver", phase="promote"),
    )
}
