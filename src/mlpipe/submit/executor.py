"""What a driver starts stages with: an Executor on each backend, a Handle for each stage under way."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from mlpipe._core.errors import ErrorKind
from mlpipe.plan.plan import Plan


@dataclass(frozen=True)
class Ended:
    """How a stage ended. `kind` says whose fault a failure is; `outcome` is kept in run.json. `lost`: this
    attempt was given up, perhaps it still runs where nobody reaches it; another one may do better."""

    state: Literal["done", "failed", "cancelled"]
    message: str = ""
    kind: ErrorKind | None = None
    exit_code: int | None = None
    outcome: dict[str, Any] = field(default_factory=dict)
    lost: bool = False


@dataclass(frozen=True)
class Slots:
    """What a stage requests, or an executor's capacity: cores for workers and commands, and GPUs."""

    cpus: int
    gpus: int


class Handle(Protocol):
    """A stage under way. None of these waits."""

    def poll(self) -> Ended | None:
        """How it ended; None while it has not."""

    def note(self) -> str:
        """What it waits for, in words; "" when it does not."""

    def terminate(self) -> None:
        """Ask it to save and stop."""

    def kill(self) -> None:
        """Stop it at once."""


class Executor(Protocol):
    """Starts a run's stages, but for those that the driver does itself. Where they outlive their driver,
    `start` adopts those that are there."""

    def capacity(self) -> Slots:
        """Of all stages together."""

    def check(self, plan: Plan) -> None:
        """Raises MlpipeError if `plan` can never run here."""

    def start(self, plan: Plan, scratch: Path) -> Handle:
        """plan.json lies in the store already; `scratch` is an empty folder of this attempt."""


class StopRequest:
    """Asks a driver to stop; safe to call from a signal handler. The first reason stays. "detached": stages
    that outlive their driver go on, for the next one."""

    def __init__(self) -> None:
        self.kind: Literal["cancelled", "interrupted", "detached"] | None = None
        self.why = ""

    def request(self, kind: Literal["cancelled", "interrupted", "detached"], why: str) -> None:
        if self.kind is None:
            self.kind, self.why = kind, why
