"""A stage under way, followed by a thread of its own; and how it ended, from what its launcher left."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store
from mlpipe.store.outcome import NODE_FAULT, AttemptOutcome, read_outcome
from mlpipe.submit.executor import Ended

MOST_AVOIDED = 8  # machines
_LOOK_SECONDS = 0.2  # whether the stage was asked to stop


class ThreadedHandle(ABC):
    """Does what takes long (waiting, uploading) in a thread, so that `poll` never does. `_thread` is started
    by the subclass, once it is ready."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self._store = store
        self._plan = plan
        self._stopping = self._killing = False
        self._num_asked = 0
        self._note = ""  # what it waits for, in words
        self._ended: Ended | None = None
        self._thread = threading.Thread(target=self._follow, name=f"stage {plan.stage}", daemon=True)

    def poll(self) -> Ended | None:
        return self._ended

    def note(self) -> str:
        return "" if self._stopping else self._note

    def terminate(self) -> None:
        self._stopping = True
        self._num_asked += 1

    def kill(self) -> None:
        self._stopping = self._killing = True
        self._num_asked += 1

    def wait(self, seconds: float) -> None:
        """Less when the stage is asked to stop meanwhile; once it was, asking again does not matter."""
        asked, deadline = self._num_asked, time.monotonic() + seconds
        while time.monotonic() < deadline and asked == self._num_asked:
            time.sleep(_LOOK_SECONDS)

    @abstractmethod
    def _work(self) -> Ended:
        """Until the stage has ended."""

    def _follow(self) -> None:
        try:
            self._ended = self._work()
        except MlpipeError as error:
            self._ended = Ended("failed", str(error), kind=error.kind)
        except OSError as error:  # a full disk
            self._ended = Ended("failed", str(error), kind="infrastructure")
        except Exception as error:
            self._ended = Ended("failed", f"{type(error).__name__}: {error}", kind="bug")


class InDriver(ThreadedHandle):
    """What the driver does itself. It stops between two store calls, which have their own deadlines, as long
    as it has written nothing; from then on it goes through."""

    def __init__(self, store: Store, plan: Plan) -> None:
        super().__init__(store, plan)
        self._thread.start()

    def _work(self) -> Ended:
        try:
            outcome = self._plan.kind.part("driver").run(self._store, self._plan, self._raise_if_stopped)
        except SubmitError as error:
            if error.kind != "cancelled":
                raise
            return Ended("cancelled", error.message)
        return Ended("done", exit_code=0, outcome=outcome)

    def _raise_if_stopped(self) -> None:
        if self._stopping:
            raise SubmitError("stopped before it was done", kind="cancelled")


def ended_by(outcome: AttemptOutcome) -> Ended:
    """As the driver takes what a launcher has left."""
    words, code, plain = outcome.message or "", outcome.exit_code, outcome.to_plain()
    if outcome.outcome == "saved" or outcome.kind == "cancelled":
        return Ended("cancelled", words, exit_code=code, outcome=plain)
    if outcome.outcome == "failed":
        text = str(MlpipeError(words, where=outcome.where, hint=outcome.hint))
        return Ended("failed", text, kind=outcome.kind or "failed", exit_code=code, outcome=plain)
    return Ended("done", words, exit_code=code, outcome=plain)


def elsewhere(plan: Plan, outcomes: Sequence[AttemptOutcome]) -> Ended | None:
    """Of a gang whose preflight named machines that did not pass: it is started anew without them, unless so
    many were left out already that the machines are not to blame."""
    fault = next((outcome for outcome in outcomes if outcome.cause == NODE_FAULT), None)
    if fault is None:
        return None
    return replace(ended_by(fault), lost=len(plan.launch.avoid) < MOST_AVOIDED)


def outcome_keys(plan: Plan) -> list[str]:
    """One for each node. A launcher deletes its own when it begins, and writes it when it ends."""
    names = [f"outcome-node-{index}.json" for index in range(1, plan.launch.num_nodes)]
    return [f"{plan.attempt_key}/{name}" for name in ("outcome.json", *names)]


def outcomes_of(store: Store, plan: Plan) -> list[AttemptOutcome]:
    """Of all nodes' launchers, as far as they left any; but the stage is done when the first node says so,
    which has its output: that another one is says nothing."""
    first, *others = (read_outcome(store, key) for key in outcome_keys(plan))
    outcomes = [first, *(one for one in others if one is not None and one.outcome != "done")]
    return [outcome for outcome in outcomes if outcome is not None]


def blamed(outcomes: Sequence[AttemptOutcome]) -> AttemptOutcome | None:
    """The first whose node is itself to blame, not its infrastructure or a peer; of ranks that hang, one that
    waited for the others knows least."""
    to_blame = [one for one in outcomes if one.kind not in (None, "infrastructure", "cancelled")]
    return min(to_blame, key=lambda outcome: ("waiting" in outcome.details, outcome.time), default=None)
