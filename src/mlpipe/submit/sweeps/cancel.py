"""Stops a sweep, or one trial that waits, with its controller or, where that is gone, in its place."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.store import leases, runs, sweeps
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import backends, driver
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.sweeps.controller import STOPPED, submission_of
from mlpipe.submit.sweeps.create import trial_submission
from mlpipe.submit.sweeps.unbegun import UNWANTED, cancel_unbegun, note_saved, record_trial


def cancel_sweep(store: Store, sweep_id: str, why: str, *, timeout_seconds: float) -> RunState:
    """Stop a sweep and all its trials, which save, and wait until they have. Raises SubmitError when
    `timeout_seconds` are over."""
    deadline = time.monotonic() + timeout_seconds
    sweep = runs.read_run(store, sweep_id)
    # one that has ended may have left a trial, and its controller lets go a moment later
    while (sweep.is_under_way or sweep.state not in runs.RUN_ENDED) and leases.lease_is_live(sweep.driver):
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
        driven = [name for name, trial in sweep.stages.items() if trial.state == "running"]
        _end_batch(store, sweep, deadline, driven)
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


def waiting_trial(store: Store, run_id: str) -> tuple[str, str] | None:
    """The sweep and the trial, if the id is of one that is to begin and is no run yet."""
    if store.exists(f"runs/{run_id}/run.json") or (sweep := runs.sweep_of_trial(store, run_id)) is None:
        return None
    name = run_id.removeprefix(f"{sweep.run_id}-")
    return (sweep.run_id, name) if sweep.stages[name].state in ("pending", "running") else None


def cancel_trial(store: Store, sweep_id: str, name: str, why: str, *, timeout_seconds: float) -> RunState:
    """Cancel a trial that has not begun, and no other; its run from then on, which can be resumed. If it
    begins meanwhile, it saves. Raises SubmitError when `timeout_seconds` are over, and SubmitError (input)
    for one whose values are not known before it begins."""
    deadline, run_id = time.monotonic() + timeout_seconds, sweeps.trial_run_id(sweep_id, name)
    if not sweeps.values_of(runs.read_run(store, sweep_id), name):
        raise SubmitError(
            f"trial {name} gets its values from what the others find, and has none before it begins",
            where=f"sweep {sweep_id}",
            hint=f"cancel it then, or all: mlpipe cancel {sweep_id}",
            kind="input",
        )

    def unwanted(run: RunState) -> RunState:
        trial = run.stages[name]
        if trial.state != "pending":
            return run
        trial = replace(trial, outcome={**trial.outcome, UNWANTED: why})
        return replace(run, stages={**run.stages, name: trial})

    while not store.exists(f"runs/{run_id}/run.json"):
        sweep = runs.update_run(store, sweep_id, unwanted)
        if sweep.stages[name].state not in ("pending", "running"):
            break
        if not leases.lease_is_live(sweep.driver):
            try:
                _cancel_in_place(store, sweep_id, name, why, deadline)
            except StoreError as error:
                if error.kind != "input":  # another controller was quicker, and sees that it is unwanted
                    raise
        if time.monotonic() > deadline:
            raise SubmitError(
                f"trial {name} of sweep {sweep_id} was cancelled and has not ended within "
                f"{timeout_seconds:.0f} s",
                hint=f"whoever drives the sweep hears of it; look again with mlpipe status {sweep_id}",
            )
        time.sleep(0.2)
    left = max(deadline - time.monotonic(), 1.0)
    return driver.cancel(store, run_id, why, timeout_seconds=left)  # which is cancelled, or has begun


def _cancel_in_place(store: Store, sweep_id: str, name: str, why: str, deadline: float) -> None:
    """As its controller would."""
    with HeldLease(store, sweep_id):
        sweep = runs.read_run(store, sweep_id)
        begun = store.exists(f"runs/{sweeps.trial_run_id(sweep_id, name)}/run.json")
        if begun or sweep.stages[name].state not in ("pending", "running"):  # one may have died in between
            return
        _end_batch(store, sweep, deadline, [other for other in sweep.stages if other != name])
        asked = submission_of(store, sweep)
        trial = trial_submission(asked, sweep_id, name, sweeps.values_of(sweep, name))
        run_id = trial.run_id or ""
        record_trial(store, backends.of_run(sweep), trial, sweep_id)
        if not note_saved(store, run_id, why):
            cancel_unbegun(store, run_id, why)
        ended = replace(sweep.stages[name], state="cancelled", message=why, ended=time.time(), outcome={})
        runs.update_run(store, sweep_id, lambda run: replace(run, stages={**run.stages, name: ended}))


def _end_batch(store: Store, sweep: RunState, deadline: float, but: Collection[str]) -> None:
    """What the sweep's place would start by itself, `but` these trials."""
    if "batch" not in sweep.meta:
        return
    batch = backends.of_run(sweep).batch(store, sweep, {}, 0, lambda text: None)
    while batch is not None and not batch.cancel(but):
        if time.monotonic() > deadline:
            raise SubmitError(
                f"trials of sweep {sweep.run_id} that have not begun cannot be taken back",
                hint="its place does not answer, or they are slow to end: try again",
            )
        time.sleep(0.2)
