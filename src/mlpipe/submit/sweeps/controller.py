"""The controller of a sweep: starts its trials, a few at a time, and follows them to their ends.

A trial is a run with a driver of its own, which goes on without the controller. What is known lies in the
store: a controller that dies is replaced by another (`mlpipe resume`), which reads run.json of the sweep and
of its trials, follows those that run, starts those that wait, and lets be those that have ended. A trial that
fails, or that somebody cancels, stops no other.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from mlpipe._core.errors import MlpipeError, StoreError, SubmitError
from mlpipe._core.processes import ProcessId, is_alive
from mlpipe.observe.measured import CurveFollower, metrics_of, value_at, value_of
from mlpipe.spec.sweep import DEFAULT_ETA
from mlpipe.store import leases, runs, sweeps
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState, RunStatus, StageState
from mlpipe.submit import backends, seal
from mlpipe.submit.adopt import LET_GO_SECONDS, DriveRequest
from mlpipe.submit.batch import METHODS, Batch
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.held_lease import HeldLease, update_held
from mlpipe.submit.submission import Console, Submission
from mlpipe.submit.sweeps.asha import goes_on, rungs
from mlpipe.submit.sweeps.create import slots_of, sweep_of, trial_submission
from mlpipe.submit.sweeps.promote import promote_best
from mlpipe.submit.sweeps.slots import part_of_machine
from mlpipe.submit.sweeps.tpe import suggest
from mlpipe.submit.sweeps.unbegun import UNWANTED, cancel_unbegun, note_saved, record_trial

STOPPED = "its sweep was stopped"  # why a trial is cancelled that goes on when its sweep does
_TERMINATED = "stopped by SIGTERM"  # and of one on this machine that did not hear it in time
_LOOK_SECONDS = 0.2, 2.0  # between two looks at the trials: in a folder, in a bucket
_UNDRIVEN_SECONDS = 3.0  # between two looks for a driver that has no lease
_MAX_DRIVERS = 5  # that a trial gets here, each after the one before died
_AT_ONCE_SECONDS = 20.0  # for drivers on this machine to end what they drive


@dataclass
class _Following:
    """A trial under way."""

    run: RunState
    num_drivers: int = 1
    looked: float = 0.0  # monotonic: for a driver without a lease
    curve: CurveFollower | None = None


def drive_sweep(
    store: Store,
    sweep_id: str,
    *,
    stop: StopRequest,
    console: Console,
    watch: Callable[[RunState], None] = lambda state: None,
    trust_store: bool = False,
    promotes: bool = True,
) -> RunState:
    """Run what is left of a sweep, until all its trials have ended or `stop` says so; its final state. A
    second signal, as KeyboardInterrupt, stops trials on this machine at once. `promotes`: the best one, if
    `sweep.promote` says so.

    Raises SubmitError or StoreError (input) if another controller is alive, or the sweep is not what it was
    when it was submitted; SubmitError if the lease was lost on the way. Trials go on then.
    """
    former = runs.read_run(store, sweep_id)
    submission = submission_of(store, former, trust_store=trust_store)
    with HeldLease(store, sweep_id) as lease:
        former = runs.read_run(store, sweep_id)  # as the controller before us left it
        again = _waits_again(store, former)
        waits = any(trial.state in ("pending", "running") for trial in former.stages.values())
        lacks = former.state == "failed" and sweeps.best(former) is not None  # to be promoted
        if former.state in runs.RUN_ENDED and not (again or waits or lacks):
            return former
        runs.reopen(store, sweep_id, (), again=again)
        return _Controller(submission, lease, stop, console, promotes, former.state).run(watch)


def submission_of(store: Store, sweep: RunState, *, trust_store: bool = False) -> Submission:
    """As which the sweep was asked for. Raises SubmitError (input) if it is not what it was then."""
    sealed = seal.verified(store, sweep, digests=None, trust_store=trust_store)
    pipeline, name = sealed.load(sweep.run_id), f"runs/{sweep.run_id}/pipeline.yaml"
    return Submission(
        str(sweep.meta.get("spec") or name),
        sealed.pipeline,
        sealed.overrides,
        pipeline,
        store.url,
        sealed.folder,
        run_id=sweep.run_id,
    )


def _waits_again(store: Store, sweep: RunState) -> list[str]:
    """Trials that the sweep's own stop cancelled, and those that somebody has resumed by now. One that
    somebody resumed and that then ended otherwise than done stays as it is: it was not the sweep's."""
    again = []
    for name, trial in sweep.stages.items():
        if trial.state not in ("failed", "cancelled", "skipped"):
            continue
        run_id = sweeps.trial_run_id(sweep.run_id, name)
        run = runs.read_run(store, run_id) if store.exists(f"runs/{run_id}/run.json") else None
        if (
            run is None
            or run.state not in ("failed", "cancelled")
            or (trial.message == STOPPED and run.message in (STOPPED, _TERMINATED))
        ):
            again.append(name)
    return again


def _rungs(submission: Submission) -> list[int]:
    """Of the pipeline's training, as the file has it."""
    sweep = sweep_of(submission)
    steps = max((one.work.steps for one in submission.pipeline.stages if one.kind.is_training), default=0)
    return rungs(sweep.min_steps or max(1, steps // 27), steps, sweep.eta or DEFAULT_ETA)


class _Controller:
    def __init__(
        self,
        submission: Submission,
        lease: HeldLease,
        stop: StopRequest,
        console: Console,
        promotes: bool,
        left_as: RunStatus,
    ) -> None:
        """`left_as`: by the controller before us."""
        self._promotes, self._left_as = promotes, left_as
        self._store, self._console = lease.store, console
        self._submission, self._lease, self._stop = submission, lease, stop
        self._sweep, self._id = sweep_of(submission), submission.run_id or ""
        self._rungs = _rungs(submission)
        self.state = runs.read_run(self._store, self._id)
        self._backend = backends.of_run(self.state)
        self._num_slots = slots_of(self._sweep)
        self._following: dict[str, _Following] = {}
        self._deleted: set[str] = set()  # trials that wait, because checkpoints of them are being deleted
        self._batch: Batch | None = None
        self._waiting: Mapping[str, str] = {}  # trials that the batch has not begun
        self._is_rid = True  # of what the batch had besides trials with drivers, once the sweep stops
        self._look_seconds = _LOOK_SECONDS[self._store.local_path("runs") is None]
        self._looked_for_cancel = 0.0

    def run(self, watch: Callable[[RunState], None]) -> RunState:
        """See `drive_sweep`."""
        self._update(lambda run: replace(run, state="running", message=""))
        self._make_batch()
        try:
            while True:
                self._lease.check()
                self._look_for_cancel()
                self._round()
                watch(self.state)
                is_left = self._stages("pending") if self._stop.kind is None else not self._is_rid
                running = {name for name, trial in self.state.stages.items() if trial.state == "running"}
                if self._stop.kind is not None:
                    running -= self._deleted
                if not running and not is_left:
                    return self._finish()
                time.sleep(self._look_seconds)
        except KeyboardInterrupt:  # the second signal
            self._stop_at_once()
            return self._finish()

    def _round(self) -> None:
        """A store that is away for a while stops no trial; the lease bounds how long."""
        try:
            for name, trial in self.state.stages.items():
                waits = self._stop.kind is not None and name in self._deleted
                if trial.state == "running" and name not in self._following and not waits:
                    self._begin(name, adopt=True)  # of the controller before us
            for name in list(self._following):
                self._follow(name)
            if self._batch is not None:
                self._tend(self._batch)
            if self._stop.kind is None:
                self._take_back_unbegun()
            while self._stop.kind is None and (new := self._next()) is not None:
                self._start(new)
            if self._stop.kind is not None:
                for name, following in self._following.items():
                    self._ask_to_stop(name, following, STOPPED)
        except StoreError as error:
            if error.kind != "infrastructure":
                raise

    def _next(self) -> str | None:
        """Which trial gets a driver now. One that the batch has begun waits for nobody: of those under way
        some may be queued again, and Slurm counts them itself; but nor do thousands come at once."""
        room = self._sweep.max_parallel - len(self._stages("running"))
        for name, trial in self.state.stages.items():
            if trial.state == "pending" and name not in self._waiting:
                has_begun = self._batch is not None and self._batch.trial(name) is not None
                if room > (-self._sweep.max_parallel if has_begun else 0):
                    return name
        return None

    def _make_batch(self) -> None:
        if self._sweep.method not in METHODS or not self._backend.has_batches:
            return
        known = {info.key.split("/")[1] for info in self._store.list("index", recursive=False)}
        fresh = {}
        for name, trial in self.state.stages.items():
            run_id = sweeps.trial_run_id(self._id, name)
            is_fresh = trial.state == "pending" and run_id not in known
            if is_fresh and "batch" in self.state.meta:  # it may have begun while there was no controller
                is_fresh = self._is_untouched(name)
            if is_fresh:
                values = sweeps.values_of(self.state, name)
                fresh[name] = trial_submission(self._submission, self._id, name, values)
        most = self._sweep.max_parallel
        sweep = replace(self.state, state=self._left_as)
        self._batch = batch = self._backend.batch(self._store, sweep, fresh, most, self._console.note)
        if batch is not None:  # before any of it is sent
            self._is_rid = False
            self._update(lambda run: replace(run, meta={**run.meta, "batch": batch.meta()}))

    def _is_untouched(self, name: str) -> bool:
        """Nobody has written anything of the trial."""
        return next(iter(self._store.list(f"runs/{sweeps.trial_run_id(self._id, name)}")), None) is None

    def _tend(self, batch: Batch) -> None:
        if self._stop.kind is not None:
            self._is_rid = batch.cancel(self._following)
            return
        self._waiting = batch.waiting()
        if self.state.meta["batch"] != (kept := batch.meta()):
            self._update(lambda run: replace(run, meta={**run.meta, "batch": kept}))
        for name, why in batch.gone().items():
            if self.state.stages[name].state == "pending" and self._is_untouched(name):
                self._cancel_unbegun(name, why)
        said = {
            name: why
            for name, why in self._waiting.items()
            if self.state.stages[name].state == "pending" and self.state.stages[name].message != why
        }

        def say(run: RunState) -> RunState:
            told = {name: replace(run.stages[name], message=why) for name, why in said.items()}
            return replace(run, stages={**run.stages, **told})

        if said:
            self._update(say)

    def _take_back_unbegun(self) -> None:
        """Trials that somebody cancelled before they began, see `cancel.py`. Of those that the batch has, it
        tells once they are gone; one that has begun there meanwhile gets its driver, and is cancelled as any
        run."""
        for name, trial in self.state.stages.items():
            if trial.state != "pending" or (why := trial.outcome.get(UNWANTED)) is None:
                continue
            if self._batch is None or (name not in self._waiting and self._batch.trial(name) is None):
                self._cancel_unbegun(name, why)
            elif name in self._waiting:
                self._batch.take_back(name)

    def _cancel_unbegun(self, name: str, why: str) -> None:
        why = self.state.stages[name].outcome.get(UNWANTED, why)
        run_id = self._recorded(name, self._batch.trial(name) if self._batch else None).run_id or ""
        cancel_unbegun(self._store, run_id, why)  # a run, which `mlpipe resume` finds
        self._ended(name, "cancelled", why, {})

    # A trial

    def _start(self, name: str) -> None:
        taken = {trial.outcome.get("slot") for trial in self._stages("running")}
        slot = min(set(range(self._num_slots)) - taken, default=0)
        values = sweeps.values_of(self.state, name) or self._suggested(name)
        begun = self._batch.trial(name) if self._batch is not None else None

        def change(run: RunState) -> RunState:
            trial = replace(
                run.stages[name],
                state="running",
                attempt=1,
                message="",
                started=time.time(),
                outcome={"slot": slot} | ({"batch": begun} if begun is not None else {}),
            )
            trials = {**run.meta["trials"], name: values}
            return replace(run, stages={**run.stages, name: trial}, meta={**run.meta, "trials": trials})

        # first the state, then the run: whoever takes over knows that there may be one
        self._update(change)
        self._begin(name)

    def _suggested(self, name: str) -> Mapping[str, Any]:
        """From what the other trials have found; one that failed or was cancelled has found nothing."""
        known = [
            (sweeps.values_of(self.state, other), sweeps.value_of(trial))
            for other, trial in self.state.stages.items()
            if trial.state == "running" or sweeps.value_of(trial) is not None
        ]
        return suggest(self._sweep, int(name), known)

    def _begin(self, name: str, *, adopt: bool = False) -> None:
        """Anew, or again where the run is there already; `adopt`: see `_driven`."""
        is_told = name in self._deleted
        self._deleted.discard(name)
        try:
            run = self._driven(name, adopt=adopt)
            self._following.setdefault(name, _Following(run)).run = run
        except leases.DeletionError as error:  # the next round asks again
            if not is_told:
                self._console.note(f"trial {name} waits: {error.message}")
            self._deleted.add(name)
            self._following.pop(name, None)
        except MlpipeError as error:
            if isinstance(error, StoreError) and error.kind == "infrastructure":
                raise
            self._ended(name, "failed", str(error), {"kind": error.kind})

    def _driven(self, name: str, *, adopt: bool = False) -> RunState:
        """The trial's run, with a driver unless it is done; `adopt`: unless it has ended, not by the
        sweep's own stop. Raises SubmitError (input) if the run of its id is another one, DeletionError while
        checkpoints of it are being deleted."""
        store, run_id, submission = self._store, sweeps.trial_run_id(self._id, name), self._recorded(name)
        run = runs.read_run(store, run_id)
        asked = tuple(run.meta.get("set", ()))[: len(submission.overrides)]  # a resume adds to them
        if asked != submission.overrides or runs.read_pipeline(store, run_id) != submission.text:
            raise SubmitError(
                f"run {run_id} is there already, and is another one than this trial",
                hint="delete it, or choose another --sweep-id",
                kind="input",
            )
        deadline = time.monotonic() + LET_GO_SECONDS  # for a driver that has said how it ended
        while (
            run.state in ("failed", "cancelled")
            and leases.is_driven(store, run)
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
            run = runs.read_run(store, run_id)
        if run.state == "done" or leases.is_driven(store, run):
            return run
        if adopt and run.state in runs.RUN_ENDED and run.message not in (STOPPED, _TERMINATED):
            return run
        self._following.setdefault(name, _Following(run))  # for a second signal while its driver starts
        slot = int(self.state.stages[name].outcome.get("slot", 0)) % self._num_slots
        with part_of_machine(self._backend, slot, self._num_slots):
            DriveRequest(
                self._backend, store, run_id, submission.pipeline, None, self._console
            ).start_driver()
        return runs.read_run(store, run_id)

    def _recorded(self, name: str, begun: Mapping[str, str] | None = None) -> Submission:
        """The trial's, of which there is a run from now on. `begun`: as what, if it is not under way."""
        begun = begun or self.state.stages[name].outcome.get("batch")
        submission = trial_submission(self._submission, self._id, name, sweeps.values_of(self.state, name))
        is_new = record_trial(self._store, self._backend, submission, self._id, begun)
        if is_new and self._left_as == "cancelled":
            note_saved(self._store, submission.run_id or "", STOPPED)
        return submission

    def _follow(self, name: str) -> None:
        following = self._following[name]
        try:
            following.run = run = runs.read_run(self._store, following.run.run_id)
        except StoreError as error:
            if error.kind == "infrastructure":
                raise
            self._ended(name, "failed", "somebody deleted its run", {"kind": "infrastructure"})
            return
        self._judge(name, following)
        if run.state in runs.RUN_ENDED:
            self._end(name, run)
            return
        if self._is_undriven(following):
            if following.num_drivers == _MAX_DRIVERS:
                message = f"{_MAX_DRIVERS} drivers died; go on with it by mlpipe resume {run.run_id}"
                self._ended(name, "failed", message, {"kind": "infrastructure"})
            else:
                self._console.note(f"trial {name} has no driver: it gets one")
                following.num_drivers += 1
                self._begin(name, adopt=True)

    def _judge(self, name: str, following: _Following) -> None:
        """At the rungs that it has reached; what was judged before stays. The word is written before it is
        acted upon."""
        if self._sweep.method != "asha":
            return
        stopped = self.state.stages[name].outcome.get("stopped_at")
        if stopped is None and following.curve is None:
            stage = next(one.name for one in self._submission.pipeline.stages if one.kind.is_training)
            following.curve = CurveFollower(self._store, stage, self._sweep.metric.name)
        if stopped is None and following.curve is not None:
            following.curve.poll(following.run)
            for step in self._rungs:
                value = value_at(following.curve.points, step)
                if stopped is None and value is not None:
                    stopped = self._arrive(name, step, value, following.run.state == "done")
        if stopped is not None and following.run.state not in runs.RUN_ENDED:
            self._ask_to_stop(name, following, f"stopped by asha at step {stopped}")

    def _arrive(self, name: str, step: int, value: float, is_done: bool) -> int | None:
        """The step, if it is stopped there; one that was quicker than we looked is not."""
        there = self.state.meta.get("rungs", {}).get(str(step), {})
        if name in there:
            return None
        less, eta = self._sweep.metric.direction == "min", self._sweep.eta or DEFAULT_ETA
        stopped = not is_done and not goes_on(value, there.values(), eta, less_is_better=less)

        def change(run: RunState) -> RunState:
            rungs = {**run.meta.get("rungs", {}), str(step): {**there, name: value}}
            trial = run.stages[name]
            if stopped:
                trial = replace(trial, outcome={**trial.outcome, "stopped_at": step, "value": value})
            return replace(run, meta={**run.meta, "rungs": rungs}, stages={**run.stages, name: trial})

        self._update(change)
        return step if stopped else None

    def _is_undriven(self, following: _Following) -> bool:
        """Not before the second look in a row finds neither a lease nor a driver that is about to take it."""
        if leases.lease_is_live(following.run.driver):
            following.looked = 0.0
            return False
        now = time.monotonic()
        if following.looked == 0.0:
            following.looked = now
        if now - following.looked < _UNDRIVEN_SECONDS:
            return False
        following.looked = 0.0
        return not self._backend.driver_is_alive(following.run.run_id, None)

    def _end(self, name: str, run: RunState) -> None:
        metrics = metrics_of(self._store, run)
        value = value_of(metrics, self._sweep.metric.name)
        outcome: dict[str, Any] = {"metrics": metrics}
        message = run.message
        known = self.state.stages[name].outcome
        if run.state == "cancelled" and "stopped_at" in known:
            outcome |= {key: known[key] for key in ("stopped_at", "value")}
            message = f"stopped by asha at step {known['stopped_at']}"
        elif run.state == "cancelled" and self._stop.kind is not None:
            message = STOPPED
        if run.state == "done":
            outcome["value"] = value
            message = "" if value is not None else f"it has measured no {self._sweep.metric.name!r}"
        for stage in run.stages.values():
            if stage.state == "failed":
                outcome["kind"], message = (stage.outcome or {}).get("kind") or "failed", stage.message
                break
        self._ended(name, run.state, message, outcome)

    def _ended(self, name: str, state: Any, message: str, outcome: dict[str, Any]) -> None:
        self._change(name, state=state, message=message, ended=time.time(), outcome=outcome)
        self._following.pop(name, None)  # not before it is written

    # How it stops

    def _look_for_cancel(self) -> None:
        if self._stop.kind is None and time.monotonic() - self._looked_for_cancel > 1.0:
            self._looked_for_cancel = time.monotonic()
            try:
                why = runs.cancel_requested(self._store, self._id)
                self.state = runs.read_run(self._store, self._id)  # of its trials some may be unwanted
            except StoreError:
                return
            if why is not None:
                self._stop.request("cancelled", why)

    def _ask_to_stop(self, name: str, following: _Following, why: str) -> None:
        """Each time anew: a driver that starts forgets what was asked before."""
        runs.request_cancel(self._store, following.run.run_id, why)

    def _stop_at_once(self) -> None:
        """Drivers on this machine: the second signal. Elsewhere trials have been asked to save, and will."""
        deadline = time.monotonic() + _AT_ONCE_SECONDS
        while True:
            if self._batch is not None:
                self._is_rid = self._batch.cancel(self._following)
            with suppress(StoreError):  # the signal reaches those on this machine without a store
                for name, following in self._following.items():
                    self._ask_to_stop(name, following, STOPPED)
            if (self._backend.has_own_driver or not self._following) and self._is_rid:
                return
            if time.monotonic() > deadline:
                return
            for following in self._following.values():
                lease = following.run.driver
                if lease is not None and is_alive(ProcessId(lease.pid, lease.namespace, lease.started)):
                    os.kill(lease.pid, signal.SIGTERM)
            time.sleep(0.5)
            with suppress(StoreError):
                for name in list(self._following):
                    self._follow(name)

    def _finish(self) -> RunState:
        if self._stop.kind is not None:
            # what has not ended by now is followed by the next controller
            self._update(lambda run: replace(run, state="cancelled", message=self._stop.why))
            return self.state
        best = sweeps.best(self.state)
        failed = [name for name, trial in self.state.stages.items() if trial.state == "failed"]
        words = [f"best: {best}" if best is not None else f"no trial has a {self._sweep.metric.name!r}"]
        words += [f"{len(failed)} of {len(self.state.stages)} failed"] if failed else []
        none_is_left = all(trial.state == "cancelled" for trial in self.state.stages.values())
        state: RunStatus = "done" if best is not None else "cancelled" if none_is_left else "failed"
        promoted: dict[str, Any] = {}
        if best is not None and self._promotes and (wanted := self._sweep.promote) is not None:
            try:
                promoted = {"promoted": promote_best(self._store, self.state, wanted.as_, wanted.alias)}
            except MlpipeError as error:
                state, words = "failed", [*words, f"not promoted: {error.told}"]
        message = "; ".join(words)
        self._update(lambda run: replace(run, state=state, message=message, meta={**run.meta, **promoted}))
        return self.state

    # What is known

    def _stages(self, state: str) -> list[StageState]:
        return [trial for trial in self.state.stages.values() if trial.state == state]

    def _change(self, name: str, **changes: Any) -> None:
        def change(run: RunState) -> RunState:
            return replace(run, stages={**run.stages, name: replace(run.stages[name], **changes)})

        self._update(change)

    def _update(self, change: Callable[[RunState], RunState]) -> None:
        self.state = update_held(self._store, self._id, self._lease.holder, change)
