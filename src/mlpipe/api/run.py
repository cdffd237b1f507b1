"""A run in Python: how it stands, what came of it, and how to stop it or go on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from mlpipe._core.errors import ErrorKind, StoreError, SubmitError, TrainError
from mlpipe.api.stores import store_of
from mlpipe.api.watch import Lines
from mlpipe.store import leases, runs
from mlpipe.store.open import default_url, open_store
from mlpipe.store.runs import RunState

if TYPE_CHECKING:
    from mlpipe.api.pipeline import Overrides
    from mlpipe.api.table import Table
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState, RunStatus

_POLL_SECONDS = 0.5  # of a folder; an S3 server is asked four times less often
_DRIVERLESS_SECONDS = 30.0  # between two drivers


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint. `key`: where it lies in the run's store; `path`: the folder, None of a store
    that is none. `time`: of its commit, Unix seconds."""

    stage: str
    step: int
    key: str
    path: Path | None
    time: float
    size_bytes: int


class Run:
    """A run of some store. Each call reads the store anew, since a run that has not ended changes."""

    def __init__(self, run_id: str, store: str | None = None) -> None:
        """Finds a run: in `store`, else in MLPIPE_STORE or ./runs, else where this machine has used one.
        Raises StoreError (input) where there is none of this id, or several stores have one."""
        self._store = store_of(run_id, open_store(default_url(store)), elsewhere=store is None)
        self.id = run_id

    @classmethod
    def of(cls, store: Store, run_id: str) -> Self:
        """The one of a store that is open."""
        made = cls.__new__(cls)
        made._store, made.id = store, run_id
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.id!r}, store={self.store!r})"

    @property
    def store(self) -> str:
        """The store's URL."""
        return self._store.url

    @property
    def opened(self) -> Store:
        """The store itself."""
        return self._store

    @property
    def status(self) -> RunStatus:
        """`pending`, `running`, `done`, `failed` or `cancelled`. `pending` also while a build of Jenkins that
        is to make the run has not."""
        from mlpipe.submit import backends

        return "pending" if backends.awaited(self._store, self.id) is not None else self.state().state

    @property
    def stages(self) -> dict[str, str]:
        """The status of each stage, in the order of the pipeline: also `skipped`."""
        return {name: stage.state for name, stage in self.state().stages.items()}

    def state(self) -> RunState:
        """All that run.json says. Raises StoreError where there is no run (yet)."""
        return runs.read_run(self._store, self.id)

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Until the run has ended; how it ended. Raises SubmitError after `timeout` seconds, and where nobody
        drives a run that has not ended."""
        from mlpipe.submit import backends

        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        pause = _POLL_SECONDS if self._store.local_path("runs") is not None else 4 * _POLL_SECONDS
        driven = time.monotonic()
        while (status := self.status) not in runs.RUN_ENDED:
            if time.monotonic() > deadline:
                raise SubmitError(f"run {self.id} has not ended within {timeout:g} s: it is {status}")
            if backends.awaited(self._store, self.id) is not None or _may_be_driven(self.state()):
                driven = time.monotonic()
            elif time.monotonic() - driven > _DRIVERLESS_SECONDS:
                raise SubmitError(
                    f"nobody drives run {self.id}", hint=f"go on with mlpipe.Run({self.id!r}).resume()"
                )
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        return status

    def check(self) -> Run:
        """The run itself, if it is done. Raises TrainError for a run that failed or was cancelled, with the
        message of the first stage that did, and SubmitError for one that has not ended."""
        run = self.state()
        if run.state == "done":
            return self
        if run.state not in runs.RUN_ENDED:
            raise SubmitError(f"run {self.id} is {run.state}", hint="wait() waits for it", kind="input")
        for name, stage in run.stages.items():
            if stage.state in ("failed", "cancelled"):
                kind: ErrorKind = "cancelled" if stage.state == "cancelled" else "failed"
                kind = (stage.outcome or {}).get("kind") or kind
                where = f"run {self.id}, stage {name}"
                raise TrainError(stage.message or stage.state, where=where, kind=kind)
        raise TrainError(run.message or run.state, where=f"run {self.id}", kind="cancelled")

    def metrics(self, stage: str | None = None) -> Table:
        """What was measured, a row a step of each training stage (of `stage` alone): `stage`, `step`, `time`,
        `loss`, `lr`, `grad_norm`, `tokens_per_second`, `mfu_ratio`, `seconds`. What a validation found stands
        in the row of its step, as `val_<name>`; what an evaluate stage found, in a row of its own. Steps that
        were lost to a restart are left out."""
        from mlpipe.api.metrics import metrics

        return metrics(self._store, self.state(), self._named(stage))

    def checkpoint(
        self, which: Literal["newest", "best"] = "newest", stage: str | None = None
    ) -> SavedCheckpoint | None:
        """The newest committed checkpoint, or the best by `validate.best`; None where there is none. Of
        several training stages: the last one that has any."""
        from mlpipe.store import catalogue

        find = catalogue.best if which == "best" else catalogue.latest
        for name in reversed(self._named(stage)):
            checkpoint = find(self._store, f"runs/{self.id}/stages/{name}")
            if checkpoint is not None:
                path = self._store.local_path(checkpoint.key)
                return SavedCheckpoint(
                    name, checkpoint.step, checkpoint.key, path, checkpoint.time, checkpoint.size_bytes
                )
        return None

    def logs(self, stage: str | None = None, rank: int | None = None, tail: int | None = None) -> str:
        """What the stages' latest attempts printed (one rank, the last `tail` lines of each log), with the
        stage and the rank in front of each line where there are several."""
        from mlpipe.observe.logs import merged
        from mlpipe.submit import backends

        names, state = self._named(stage), self.state()
        read = backends.logs(self._store, state, stage=stage, rank=rank).read(state, rest=True)
        logs = [(file, lines if tail is None else lines[max(len(lines) - tail, 0) :]) for file, lines in read]
        return b"".join(merged(logs, several_stages=len(names) > 1)).decode(errors="replace")

    def cancel(self, timeout: float = 660.0) -> RunStatus:
        """Stops the run and waits until it has: what it learnt is saved first. Raises SubmitError after
        `timeout` seconds."""
        from mlpipe.api.stopping import stop_run

        run = stop_run(self._store, self.id, Lines(quiet=True), timeout_seconds=timeout)
        return run.state if isinstance(run, RunState) else "cancelled"

    def resume(
        self,
        overrides: Overrides = (),
        *,
        from_step: int | None = None,
        allow_change: Sequence[str] = (),
        quiet: bool = False,
    ) -> Run:
        """Goes on with a run that was stopped, failed, or lost its driver, as `mlpipe resume` does: stages
        that are done stay done, training goes on from its last checkpoint or from that of `from_step`. A run
        of this machine goes on here, and it returns or raises as `mlpipe.run` does; one of a cluster goes on
        there, and it returns at once."""
        from mlpipe.api.driving import drive
        from mlpipe.api.pipeline import as_overrides
        from mlpipe.api.resuming import go_on_there
        from mlpipe.submit import backends
        from mlpipe.submit.changes import Changes
        from mlpipe.submit.driver import DriveOptions

        run, lines = self.state(), Lines(quiet=quiet)
        if run.is_sweep:
            raise SubmitError(
                f"{self.id} is a sweep", hint=f"go on with mlpipe.Sweep({self.id!r}).resume()", kind="input"
            )
        options = DriveOptions(changes=Changes(as_overrides(overrides), tuple(allow_change), from_step))
        backend = backends.of_run(run)
        if backend.has_own_driver:
            go_on_there(lines, self._store, run, backend, options)
            return self
        drive(self._store, self.id, options, lines)
        return self.check()

    def _named(self, stage: str | None) -> list[str]:
        names = list(self.state().stages)
        if stage is not None and stage not in names:
            raise StoreError(
                f"run {self.id} has no stage {stage!r}", hint=f"it has {', '.join(names)}", kind="input"
            )
        return names if stage is None else [stage]


def _may_be_driven(run: RunState) -> bool:
    """A driver of its backend's own may still be about to start."""
    from mlpipe.submit import backends

    if run.state == "pending" and backends.load(run.backend).has_own_driver:
        return True
    return leases.undriven_since(run) is None
