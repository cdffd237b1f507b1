"""Walks the stages of a run, on any backend, as `dag.py` says. What is known lies in the store: a driver that
dies is replaced by another, which reads run.json and goes on. When the run is stopped, the stages under way
are asked to save, and nothing new starts.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlpipe._core.errors import MlpipeError, PlanError, StoreError, SubmitError
from mlpipe._core.records import Submitted
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue, outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit import seal
from mlpipe.submit.dag import Dag, fits, outcome_of
from mlpipe.submit.executor import Ended, Executor, Handle, StopRequest
from mlpipe.submit.handle import InDriver
from mlpipe.submit.held_lease import update_held
from mlpipe.submit.wanted import Wanted

_POLL_SECONDS = 0.1
_CANCEL_SECONDS = 1.0  # between two looks for a request to cancel: a GET each
_MAX_ATTEMPTS = 20  # of a stage that loses one node after the other
_AFTER_KILL_SECONDS = 10.0  # for a killed stage to be seen as ended


@dataclass
class _Running:
    handle: Handle
    plan: Plan
    scratch: Path
    started: float  # monotonic
    terminated: float | None = None
    killed: float | None = None
    timed_out: bool = False


def _avoids(plan: Plan) -> str:
    if not plan.launch.avoid:
        return ""
    nodes = ", ".join(plan.launch.avoid)
    return f"leaves out {nodes}, which in an earlier attempt did not pass the preflight or got slow"


@dataclass(frozen=True)
class Drive:
    """One driver's hold on a run, under the lease `holder`. `scratch`: a folder of the run on this machine.
    `alive()` raises when the lease could not be renewed. `watch(state)` is called about ten times a second.
    `outlives_driver`: the stages go on without it."""

    store: Store
    run_id: str
    holder: str
    scratch: Path
    stop: StopRequest
    alive: Callable[[], None] = lambda: None
    watch: Callable[[RunState], None] = lambda state: None
    outlives_driver: bool = False


class DagRunner:
    """Walks a run. `needs` names each stage's needs, in the order of the file; `make_plan(stage, attempt)`
    plans it when its needs are done; `executor` starts it."""

    def __init__(
        self,
        drive: Drive,
        needs: Mapping[str, Sequence[str]],
        make_plan: Callable[[str, int], Plan],
        executor: Executor,
    ) -> None:
        self._drive = drive
        self._store, self._run_id, self._stop = drive.store, drive.run_id, drive.stop
        self._dag = Dag(needs)
        self._make_plan = make_plan
        self._executor = executor
        self._running: dict[str, _Running] = {}
        self._planned: dict[str, Plan] = {}  # ready, but without room so far
        self._wanted = Wanted(drive.store, drive.run_id)
        self._looked_for_cancel = 0.0
        self.state = runs.read_run(drive.store, drive.run_id)

    def run(self, *, only_wanted: bool = False) -> RunState:
        """Walk until nothing is left to start (`only_wanted`: of what is asked for meanwhile). Returns the
        final state; raises what `alive` or the store raises, after the stages under way were killed."""
        names = [] if only_wanted else list(self._dag.needs)
        try:
            self._adopt()
            while True:
                self._drive.alive()
                if self._stop.kind == "detached":
                    return self.state
                self._look_for_cancel()
                self._collect()
                if self._stop.kind is not None:
                    for running in self._running.values():
                        self._terminate(running)
                else:
                    self.state = self._wanted.look(self.state, names)
                    self._skip(names)
                    self._start(names)
                self._drive.watch(self.state)
                if not self._running and (self._stop.kind is not None or self._is_idle(names)):
                    return self._finish()
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:  # the second signal: at once
            self._kill_all()
            return self._finish()
        except BaseException:
            self._kill_all()
            raise

    # What may start

    def _is_idle(self, names: list[str]) -> bool:
        if not self._dag.startable(self.state, names):
            self.state = self._wanted.look(self.state, names, now=True)  # who asks later starts a driver
        return not self._dag.startable(self.state, names)

    def _skip(self, names: Sequence[str]) -> None:
        """Again and again: needs may stand later in the file."""
        while (spoiled := self._dag.spoiled(self.state, names)) is not None:
            name, need = spoiled
            self._change(name, state="skipped", message=f"needs {need!r}, which did not finish")

    def _start(self, names: Sequence[str]) -> None:
        for name in self._dag.startable(self.state, names):
            if self._stop.kind is not None:
                return
            attempt = self.state.stages[name].attempt + 1
            try:
                plan = self._planned.get(name) or self._make_plan(name, attempt)
                self._executor.check(plan)
                self._planned[name] = plan
                if fits(plan, [other.plan for other in self._running.values()], self._executor.capacity()):
                    self._launch(self._planned.pop(name))
            except MlpipeError as error:
                self._planned.pop(name, None)
                self._change(
                    name,
                    state="failed",
                    attempt=attempt,
                    message=str(error),
                    ended=time.time(),
                    outcome={"kind": error.kind},
                )
                shutil.rmtree(self._drive.scratch / f"{name}-{attempt}", ignore_errors=True)

    def _launch(self, plan: Plan) -> None:
        scratch = self._drive.scratch / f"{plan.stage}-{plan.attempt}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._store.put(f"{plan.attempt_key}/plan.json", plan.to_json().encode())
        # First the state, then the process: whoever takes over knows that an attempt may be under way.
        self._change(
            plan.stage,
            state="running",
            attempt=plan.attempt,
            message="",
            started=time.time(),
            ended=None,
            exit_code=None,
            outcome={},
        )
        runs.append_event(self._store, plan.attempt_key, Submitted())
        self._running[plan.stage] = _Running(self._begin(plan, scratch), plan, scratch, time.monotonic())

    def _begin(self, plan: Plan, scratch: Path) -> Handle:
        """Anew or, of a stage that outlived its driver, again."""
        if plan.kind.runs == "driver":
            return InDriver(self._store, plan)
        return self._executor.start(plan, scratch)

    # What is under way

    def _adopt(self) -> None:
        """Stages that the driver before us started and that go on without it."""
        for name, stage in self.state.stages.items():
            if stage.state != "running":
                continue
            plan = self._make_plan(name, stage.attempt)
            seal.check_plan(self._store, plan)
            scratch = self._drive.scratch / f"{name}-{stage.attempt}"
            scratch.mkdir(parents=True, exist_ok=True)
            started = time.monotonic() - max(0.0, time.time() - (stage.started or time.time()))
            self._running[name] = _Running(self._begin(plan, scratch), plan, scratch, started)

    def _collect(self) -> None:
        now = time.monotonic()
        for name, running in list(self._running.items()):
            ended = running.handle.poll()
            if ended is not None:
                self._record(name, ended)
                continue
            if (note := running.handle.note() or _avoids(running.plan)) != self.state.stages[name].message:
                self._change(name, message=note)
            limit = running.plan.launch.timeout_seconds
            if limit is not None and now - running.started > limit and not running.timed_out:
                running.timed_out = True
                self._terminate(running)
            self._escalate(name, running)

    def _escalate(self, name: str, running: _Running) -> None:
        now = time.monotonic()
        if running.killed is not None:
            if now - running.killed > _AFTER_KILL_SECONDS:
                self._record(name, Ended("cancelled", "killed, and its end was not seen"))
        elif running.terminated is not None:
            patience = running.plan.launch.shutdown_seconds
            if now - running.terminated > patience:
                running.killed = now
                running.handle.kill()

    def _record(self, name: str, ended: Ended) -> None:
        running = self._running.pop(name)
        shutil.rmtree(running.scratch, ignore_errors=True)
        if running.timed_out and ended.state == "cancelled":
            limit = running.plan.launch.timeout_seconds
            ended = replace(
                ended,
                state="failed",
                kind="failed",
                message=f"ran longer than its timeout of {limit:.0f} s; {ended.message}",
            )
        if ended.lost and self._stop.kind is None and running.plan.attempt < _MAX_ATTEMPTS:
            plan = running.plan
            catalogue.fence(self._store, plan.stage_key, plan.attempt)
            has_output = plan.kind.has_output
            digest = outputs.give_up(self._store, plan.stage_key, plan.attempt) if has_output else None
            if digest is None:
                try:
                    again = self._make_plan(name, plan.attempt + 1)
                except (PlanError, SubmitError) as error:  # there is nothing for it to run on, or too dear
                    ended = replace(ended, message=f"{ended.message}; {error}", kind=error.kind)
                else:
                    self._launch(again)
                    return
            else:
                ended = Ended("done", exit_code=0, outcome={"digest": digest})  # lost after its commit
        if ended.state == "cancelled":
            self._stop.request("cancelled", f"stage {name!r} was stopped: {ended.message}")
        self._change(
            name,
            state=ended.state,
            message=ended.message,
            ended=time.time(),
            exit_code=ended.exit_code,
            outcome={**ended.outcome, "kind": ended.kind},
        )

    # How it stops

    def _look_for_cancel(self) -> None:
        if self._stop.kind is None and time.monotonic() - self._looked_for_cancel > _CANCEL_SECONDS:
            self._looked_for_cancel = time.monotonic()
            try:
                why = runs.cancel_requested(self._store, self._run_id)
            except StoreError:
                return  # a store that is away for a while stops no training; the lease bounds how long
            if why is not None:
                self._stop.request("cancelled", why)

    def _terminate(self, running: _Running) -> None:
        if running.terminated is None:
            running.terminated = time.monotonic()
            running.handle.terminate()

    def _kill_all(self) -> None:
        if self._drive.outlives_driver and self._stop.kind is None:
            self._running.clear()  # the next driver finds them
            return
        for running in self._running.values():
            running.handle.kill()
        deadline = time.monotonic() + _AFTER_KILL_SECONDS
        while time.monotonic() < deadline:
            if all(running.handle.poll() is not None for running in self._running.values()):
                return
            time.sleep(_POLL_SECONDS)

    def _finish(self) -> RunState:
        for name, running in list(self._running.items()):
            self._record(name, running.handle.poll() or Ended("cancelled", "killed"))
        state, message = outcome_of(self.state, self._stop)
        self._update(lambda run: replace(run, state=state, message=message))
        if state == "cancelled":
            self._wanted.drop()
        self._drive.watch(self.state)
        return self.state

    def _change(self, name: str, **changes: Any) -> None:
        def change(run: RunState) -> RunState:
            stage: StageState = replace(run.stages[name], **changes)
            return replace(run, stages={**run.stages, name: stage})

        self._update(change)
        self._wanted.note(name, self.state)

    def _update(self, change: Callable[[RunState], RunState]) -> None:
        self.state = update_held(self._store, self._run_id, self._drive.holder, change)
