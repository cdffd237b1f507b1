"""Stops a sweep and its trials, with its controller or, where that is gone, in its place."""

from __future__ import annotations

import time
from dataclasses import replace

from mlpipe._core.errors import SubmitError
from mlpipe.store import leases, runs, sweeps
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import backends, driver
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.sweeps.controller import STOPPED


def cancel_sweep(store: Store, sweep_id: str, why: str, *, timeout_seconds: float) -> RunState:
    """Stop a sweep and all its trials, which save, and wait until they have. Raises SubmitError when
    `timeout_seconds` are over."""
    deadline = time.monotonic() + timeout_seconds
    sweep = runs.read_run(store, sweep_id)
    while sweep.state not in runs.RUN_ENDED and leases.lease_is_live(sweep.driver):
        runs.request_cancel(store, sweep_id, why)
        if time.monotonic() > deadline:
            raise SubmitError(
                f"sweep {sweep_id} was asked to stop and has not stopped within {timeout_seconds:.0f} s",
                hint=f"its trials save before they stop; look again with mlpipe status {sweep_id}",
            )
        time.sleep(0.2)
        sweep = runs.read_run(store, sweep_id)
    if sweep.state in runs.RUN_ENDED and not sweep.is_under_way:
        return sweep
    with HeldLease(store, sweep_id):
        stages = dict(sweep.stages)
        _end_batch(store, sweep, deadline)
        for name, trial in sweep.stages.items():
            run_id = sweeps.trial_run_id(sweep_id, name)
            if trial.state == "running" and store.exists(f"runs/{run_id}/run.json"):
                left = max(deadline - time.monotonic(), 1.0)
                driver.cancel(store, run_id, STOPPED, timeout_seconds=left)
                stages[name] = replace(trial, state="cancelled", message=STOPPED, ended=time.time())
            elif trial.state in ("pending", "running"):
                stages[name] = replace(trial, state="skipped", message=why)
        return runs.update_run(
            store, sweep_id, lambda run: replace(run, state="cancelled", message=why, stages=stages)
        )


def _end_batch(store: Store, sweep: RunState, deadline: float) -> None:
    """What the sweep's place would start by itself. Trials with drivers are the caller's."""
    if "batch" not in sweep.meta:
        return
    batch = backends.of_run(sweep).batch(store, sweep, {}, 0, lambda text: None)
    begun = [name for name, trial in sweep.stages.items() if trial.state == "running"]
    while batch is not None and not batch.cancel(begun):
        if time.monotonic() > deadline:
            raise SubmitError(
                f"trials of sweep {sweep.run_id} that have not begun cannot be taken back",
                hint="its place does not answer, or they are slow to end: try again",
            )
        time.sleep(0.2)
