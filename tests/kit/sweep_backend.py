"""A backend whose drivers are threads that train nothing: they write the records of a training whose loss is
given by the pipeline's `args`, and hear a request to cancel as a driver does."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from kit.synthetic_run import commit_checkpoint, write_records

from mlpipe.spec.model import Pipeline
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit.backend import Backend
from mlpipe.submit.executor import Executor
from mlpipe.submit.held_lease import HeldLease

STAGE = "fit"
NAME = "simulated"
TARGET = f"{__name__}:Simulated"


class Simulated(Backend):
    """`args` of the model: `floor`, below which the loss does not fall; `fails`; `dies`: its first driver
    does, and says nothing; `waits`: until the test lets it go on."""

    name = NAME
    has_own_driver = True
    started: ClassVar[Counter[str]] = Counter()  # drivers, by run
    most_at_once = 0
    go = threading.Event()
    _threads: ClassVar[dict[str, threading.Thread]] = {}
    _lock = threading.Lock()

    @classmethod
    def reset(cls) -> None:
        cls.started.clear()
        cls._threads.clear()
        cls.most_at_once = 0
        cls.go = threading.Event()

    def executor(self, store: Store, run: RunState, holder: str) -> Executor:
        raise AssertionError("its drivers start nothing")

    def check(self, submission: Any, console: Any, *, is_new: bool) -> None:
        """It takes any."""

    def start_driver(self, store: Store, run: RunState, pipeline: Pipeline, only: str | None) -> None:
        work = pipeline.stage(STAGE).work
        args: Mapping[str, Any] = {**work.model.args, "validates": work.validate_ is not None}
        steps: int = work.steps
        lease = HeldLease(store, run.run_id)
        lease.__enter__()
        with self._lock:
            self.started[run.run_id] += 1
        thread = threading.Thread(
            target=self._drive, args=(store, run.run_id, dict(args), steps, lease), daemon=True
        )
        self._threads[run.run_id] = thread
        thread.start()
        with self._lock:
            alive = sum(one.is_alive() for one in self._threads.values())
            Simulated.most_at_once = max(Simulated.most_at_once, alive)

    def driver_is_alive(self, run_id: str, only: str | None) -> bool:
        return run_id in self._threads and self._threads[run_id].is_alive()

    def _drive(self, store: Store, run_id: str, args: dict[str, Any], steps: int, lease: HeldLease) -> None:
        now = runs.read_run(store, run_id)
        attempt = now.stages[STAGE].attempt + 1
        self._set(store, run_id, "running", attempt=attempt, started=time.time())
        key = f"runs/{run_id}/stages/{STAGE}"
        if args.get("dies") and self.started[run_id] == 1:
            lease.__exit__()
            return
        state, message, done = "done", "", 0
        for step in range(1, steps + 1):
            if (why := runs.cancel_requested(store, run_id)) is not None:
                state, message = "cancelled", why
                break
            if args.get("fails") and step == 2:
                state, message = "failed", "it was asked to fail"
                break
            loss = args.get("floor", 0.0) + 1.0 / step
            head = {"v": 1, "rank": 0, "restart": 0, "kind": "step", "time": time.time()}
            write_records(store, f"{key}/attempt-{attempt}", 0, [{**head, "step": step, "loss": loss}])
            if args["validates"] and step % 2 == 0:
                found = {"step": step, "metrics": {"loss": 2 * loss, "accuracy": None}}
                write_records(store, f"{key}/attempt-{attempt}", 0, [{**head, "kind": "validation", **found}])
            done = step
            while step in args.get("rungs", ()) and not self._is_judged(store, run_id, step):
                time.sleep(0.005)
            while args.get("waits") and not self.go.is_set() and runs.cancel_requested(store, run_id) is None:
                time.sleep(0.005)
        if done:
            place = f"{key}/checkpoints/step-{done:09d}/{attempt}-{done:08x}"
            commit_checkpoint(store, place, step=done, attempt=attempt)
        self._set(store, run_id, state, message=message, ended=time.time())
        runs.update_run(store, run_id, lambda run: replace(run, state=state, message=message))  # type: ignore[arg-type]
        lease.__exit__()

    def _is_judged(self, store: Store, run_id: str, step: int) -> bool:
        """At the rung, and told so if it is to stop."""
        sweep_id, _, name = run_id.rpartition("-")
        sweep = runs.read_run(store, sweep_id)
        if "stopped_at" in sweep.stages[name].outcome:
            return runs.cancel_requested(store, run_id) is not None
        rungs = {int(at): there for at, there in sweep.meta.get("rungs", {}).items()}
        return any(name in rungs.get(at, {}) for at in (step - 1, step))

    def _set(self, store: Store, run_id: str, state: Any, **more: Any) -> None:
        def change(run: RunState) -> RunState:
            stage = replace(run.stages[STAGE], state=state, **more)
            return replace(run, state="running", stages={STAGE: stage})

        runs.update_run(store, run_id, change)


class Quiet:
    """A console that nobody watches."""

    quiet = True

    def note(self, text: str) -> None: ...

    def complain(self, text: str) -> None: ...
