"""The run of a trial that ends before it had a driver: what `mlpipe status` and `resume` find of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit.adopt import record
from mlpipe.submit.backend import Backend
from mlpipe.submit.submission import Submission

UNWANTED = "unwanted"  # in the outcome of a trial that waits: who cancelled it


def record_trial(
    store: Store, backend: Backend, trial: Submission, sweep_id: str, begun: Mapping[str, str] | None = None
) -> bool:
    """Makes the run of `trial`, unless it is there. `begun`: as what its place began it, see `Batch.trial`.
    Whether it was made."""
    if store.exists(f"runs/{trial.run_id}/run.json"):
        return False
    stages = [stage.name for stage in trial.pipeline.stages]
    record(store, backend, trial, stages, sweep=sweep_id, **({"batch": begun} if begun is not None else {}))
    return True


def note_saved(store: Store, run_id: str, why: str) -> bool:
    """Of a trial that its place began, and a stop ended before it had a driver: as if it had had one, it goes
    on in another attempt. Whether it was one."""
    stages = runs.read_run(store, run_id).stages
    stopped = {
        name: StageState("cancelled", attempt=1, message=why)
        for name in stages
        if _saved(store, run_id, name)
    }
    if stopped:
        runs.update_run(
            store, run_id, lambda run: replace(run, state="cancelled", message=why, stages=stages | stopped)
        )
    return bool(stopped)


def _saved(store: Store, run_id: str, stage: str) -> bool:
    outcome = read_outcome(store, f"runs/{run_id}/stages/{stage}/attempt-1/outcome.json")
    return outcome is not None and (outcome.outcome == "saved" or outcome.kind == "cancelled")


def cancel_unbegun(store: Store, run_id: str, why: str) -> None:
    """Of which nothing began."""

    def cancelled(run: RunState) -> RunState:
        stages = {name: replace(stage, state="skipped", message=why) for name, stage in run.stages.items()}
        return replace(run, state="cancelled", message=why, stages=stages)

    runs.update_run(store, run_id, cancelled)
