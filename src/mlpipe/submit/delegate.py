"""A backend that has runs made: it hands the pipeline to another system, a job of which calls mlpipe. Until
that has made the run, what the store has of it is the request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import ErrorKind, SubmitError
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Console, Submission

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.executor import Executor


@dataclass(frozen=True)
class HandedOver:
    """What came of a request: `document` for machines, `text` for people. `failure`: whose fault it is that
    what was waited for has failed."""

    document: dict[str, Any]
    text: str
    failure: ErrorKind | None = None


class Requested(ABC):
    """A run that was asked for. `key`: where the store has the request, `pipeline` in it (YAML)."""

    run_id: str
    key: str
    pipeline: str

    @abstractmethod
    def status(self) -> dict[str, Any]:
        """How the request stands, while there is no run."""

    @abstractmethod
    def text(self, status: dict[str, Any]) -> str:
        """The same for people."""

    @abstractmethod
    def abort(self, console: Console, timeout_seconds: float) -> bool:
        """Stops whatever is to make the run; True once that has ended. Raises SubmitError if it cannot within
        `timeout_seconds`, unless there is a run by then."""

    @abstractmethod
    def give_up(self) -> None:
        """It was cancelled before there was a run."""


class Delegate(Backend):
    """Its runs are of other backends: it starts neither stages nor drivers."""

    @abstractmethod
    def hand_over(self, submission: Submission, store: Store, console: Console, *, wait: bool) -> HandedOver:
        """Has the run made, once, whoever else asks; with `wait` until whoever makes it has ended. Ctrl-C and
        SIGTERM detach: it says how to come back, and raises KeyboardInterrupt."""

    @classmethod
    @abstractmethod
    def requested(cls, store: Store, run_id: str) -> Requested | None:
        """What was asked for under this id."""

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        raise SubmitError(f"{self.name} starts no stages: the runs that it makes are other backends'")
