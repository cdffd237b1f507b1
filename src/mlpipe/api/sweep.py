"""A sweep in Python: its trials, which of them is the best, and how to start one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import ErrorKind, Interrupt, MlpipeError, SubmitError, TrainError
from mlpipe.api.run import Run
from mlpipe.api.table import Table
from mlpipe.api.watch import Lines, in_words
from mlpipe.store import runs, sweeps

if TYPE_CHECKING:
    from mlpipe.api.pipeline import LoadedPipeline, Overrides
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState


class Sweep(Run):
    """A sweep of some store: `status`, `wait`, `check` and `cancel` are as of a run. What one of its runs
    measured or saved, ask that one: `sweep.best.checkpoint()`."""

    def __init__(self, sweep_id: str, store: str | None = None) -> None:
        """Finds a sweep, as `Run` finds a run. Raises StoreError (input) where there is none of this id, and
        SubmitError (input) for one run."""
        super().__init__(sweep_id, store)
        _check(self.state())

    @property
    def trials(self) -> list[Run]:
        """Those that have begun, in the order of their numbers."""
        ids = [sweeps.trial_run_id(self.id, name) for name in self.state().stages]
        return [Run.of(self._store, one) for one in ids if self._store.exists(f"runs/{one}/run.json")]

    @property
    def best(self) -> Run | None:
        """Of those that are done; None while none has the metric."""
        name = sweeps.best(self.state())
        return None if name is None else Run.of(self._store, sweeps.trial_run_id(self.id, name))

    def table(self) -> Table:
        """A row a trial, the best first: `trial`, `run_id`, `state`, what is varied by the last words of its
        key, and what it measured, the sweep's metric among it."""
        from mlpipe.observe.sweep_table import names_of, trial_rows

        state = self.state()
        named, metric = names_of(state), state.meta["metric"]["name"]
        return Table(
            {
                "trial": row.trial,
                "run_id": row.run_id,
                "state": row.shown_state,
                **{named[key]: value for key, value in row.values.items()},
                **row.state.outcome.get("metrics", {}),
                **({} if row.value is None else {metric: row.value}),
            }
            for row in trial_rows(self._store, state)
        )

    def resume(
        self,
        overrides: Overrides = (),
        *,
        from_step: int | None = None,
        allow_change: Sequence[str] = (),
        quiet: bool = False,
    ) -> Sweep:
        """Goes on here, as `mlpipe sweep --resume`: trials that ended stay as they are, unless the sweep
        itself stopped them. Returns or raises as `mlpipe.sweep` does. Raises SubmitError (input) for changes:
        they are of a trial, which is a run."""
        if overrides or allow_change or from_step is not None:
            raise SubmitError("a sweep goes on as it is", hint="change a trial, which is a run", kind="input")
        _drive(self._store, self.id, Lines(quiet=quiet))
        return Sweep.of(self._store, self.id).check()

    def check(self) -> Sweep:
        """The sweep itself, if it is done: one of its trials is, with its metric. Raises TrainError for one
        that failed or was cancelled, and SubmitError for one that has not ended."""
        state = self.state()
        if state.state == "done":
            return self
        if state.state not in runs.RUN_ENDED:
            raise SubmitError(f"sweep {self.id} is {state.state}", hint="wait() waits for it", kind="input")
        kinds = [trial.outcome.get("kind") for trial in state.stages.values() if trial.state == "failed"]
        kind: ErrorKind = "cancelled" if state.state == "cancelled" else next(filter(None, kinds), "failed")
        raise TrainError(state.message or state.state, where=f"sweep {self.id}", kind=kind)


def sweep(
    pipeline: LoadedPipeline,
    backend: str = "",
    *,
    sweep_id: str | None = None,
    store: str | None = None,
    wait: bool = True,
    quiet: bool = False,
    **options: Any,
) -> Sweep:
    """Runs a pipeline once for each of the values that its `sweep` names, on `backend` (see `submit`), and
    returns when all have ended; how it goes is told on standard error unless `quiet`. With `wait=False` a
    process of this machine drives it, and it returns at once. A `sweep_id` that exists goes on, if it is of
    the same pipeline.

    Ctrl-C saves and stops all trials and then raises KeyboardInterrupt; `Sweep(sweep_id).resume()` goes on.
    Raises SpecError, PlanError or SubmitError before anything starts, TrainError where no trial has its
    metric.
    """
    from mlpipe.api.start import chosen_backend, open_store_of, submission_of
    from mlpipe.submit.adopt import is_there
    from mlpipe.submit.delegate import Delegate
    from mlpipe.submit.detach import detach_unless_driven
    from mlpipe.submit.sweeps.create import create

    place = chosen_backend(pipeline, backend, options)
    if isinstance(place, Delegate):
        raise SubmitError(
            f"a sweep is not handed to {place.name}",
            hint=f"have a build do it: mlpipe render --for {place.name}",
            kind="input",
        )
    there, lines = open_store_of(pipeline, store), Lines(quiet=quiet)
    asked = submission_of(pipeline, there, sweep_id)
    if sweep_id is None or not is_there(there, sweep_id, pipeline.spec):
        sweep_id = create(there, place, asked, lines)
    lines.note(f"sweep {sweep_id} in {there.url}")
    if wait:
        _drive(there, sweep_id, lines)
        return Sweep.of(there, sweep_id).check()
    detach_unless_driven(there, sweep_id)
    return Sweep.of(there, sweep_id)


def _drive(store: Store, sweep_id: str, lines: Lines) -> None:
    """In this process. Raises KeyboardInterrupt after Ctrl-C."""
    import signal

    from mlpipe.api.signals import heard
    from mlpipe.observe.sweep_report import write_report
    from mlpipe.submit.executor import StopRequest
    from mlpipe.submit.sweeps.controller import drive_sweep

    _check(runs.read_run(store, sweep_id))
    is_main = threading.current_thread() is threading.main_thread()
    stop = StopRequest()
    with heard((signal.SIGINT,) if is_main else (), stop):
        state = drive_sweep(store, sweep_id, stop=stop, console=lines, watch=_transitions(lines))
    try:
        write_report(store, state)
    except (MlpipeError, OSError) as error:
        lines.note(f"no report: {error}")
    if stop.kind == "interrupted":
        lines.note(f"sweep {sweep_id} was stopped; go on with mlpipe.Sweep({sweep_id!r}).resume()")
        raise Interrupt


def _transitions(lines: Lines) -> Callable[[RunState], None]:
    """Says a line for each trial that begins or ends."""
    from mlpipe.observe.sweep_table import said

    seen: dict[str, str] = {}

    def watch(state: RunState) -> None:
        for name, trial in state.stages.items():
            if trial.state != seen.setdefault(name, trial.state):
                seen[name] = trial.state
                lines.note(f"{name}  {said(state, name)}  {in_words(trial)}")

    return watch


def _check(state: RunState) -> None:
    if not state.is_sweep:
        raise SubmitError(
            f"{state.run_id} is one run, not a sweep", hint=f"mlpipe.Run({state.run_id!r})", kind="input"
        )
