"""What a driver does about the stages that others ask it for (`store/wanted.py`)."""

from __future__ import annotations

import time

from mlpipe.store import runs, wanted
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_LOOK_SECONDS = 2.0  # a LIST each


class Wanted:
    """Stages that `submit --stage` has asked for, as the driver of the run sees them."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._run_id = run_id
        self._asked: set[str] = set()  # for, and not taken up yet
        self._looked = 0.0

    def look(self, state: RunState, names: list[str], *, now: bool = False) -> RunState:
        """Adds to `names` what is asked for, and returns the run's state: a stage that runs or is done is
        adopted, one that ended otherwise waits again. `now`: however short ago it was looked for."""
        if not now and time.monotonic() - self._looked < _LOOK_SECONDS:
            return state
        self._looked = time.monotonic()
        asked = wanted.asked(self._store, self._run_id)
        adopted = [
            name
            for name in asked
            if name not in state.stages or state.stages[name].state in ("running", "done")
        ]
        if adopted:
            wanted.take(self._store, self._run_id, adopted)
        self._asked = set(asked) - set(adopted)
        names += sorted(self._asked - set(names))
        again = [name for name in self._asked if state.stages[name].state != "pending"]
        return runs.reopen(self._store, self._run_id, again, forget_cancel=False) if again else state

    def note(self, name: str, state: RunState) -> None:
        """The stage has changed, as the store knows already."""
        if name in self._asked and state.stages[name].state != "pending":
            wanted.take(self._store, self._run_id, [name])
            self._asked.discard(name)

    def drop(self) -> None:
        """The run was cancelled, and so is all that was asked for."""
        wanted.take(self._store, self._run_id, wanted.asked(self._store, self._run_id))
