"""`mlpipe sweep --sweep-id ID --follow TRIAL`: how one trial goes while another process drives its sweep. A
branch of a build calls it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mlpipe._core.errors import EXIT_CODES, StoreError, SubmitError
from mlpipe.cli.session import CliSession

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState, StageState

_DRIVER_SECONDS = 300.0  # for the sweep to begin, to go on, or to get another driver
_REOPEN_SECONDS = 60.0  # for one that has ended, before this process saw anybody drive it, to go on
_LOOK_SECONDS = 1.0
_ENDED = ("done", "failed", "cancelled", "skipped")


def follow_trial(session: CliSession, store: Store, sweep_id: str, name: str, *, waits: bool = True) -> int:
    """Until the trial has ended; its exit code: 0 also of one that its sweep stopped early. `waits`: for a
    driver to come, where there is none. Raises StoreError (input) for what the sweep does not have, and
    SubmitError (infrastructure) where nobody drives it."""
    from mlpipe.observe import sweep_table
    from mlpipe.store import sweeps

    sweep = _until_ended(session, store, sweep_id, name, waits)
    trial = sweep.stages[name]
    document = {
        "sweep_id": sweep_id, "trial": name, "run_id": sweeps.trial_run_id(sweep_id, name),
        "values": dict(sweeps.values_of(sweep, name)), "state": trial.state, "message": trial.message,
        "value": sweeps.value_of(trial),
    }  # fmt: skip
    session.result(document, f"{name}  {sweep_table.said(sweep, name)}  {words(sweep, name)}")
    return exit_code(trial)


def words(sweep: RunState, name: str) -> str:
    """How the trial stands, with its metric as far as that is known."""
    from mlpipe.cli.outcome import describe
    from mlpipe.observe.sweep_table import format_value
    from mlpipe.store.sweeps import value_of

    value = value_of(sweep.stages[name])
    metric = sweep.meta.get("metric", {}).get("name")
    return describe(sweep.stages[name]) + ("" if value is None else f", {metric} {format_value(value)}")


def exit_code(trial: StageState) -> int:
    """As of the run that it is."""
    if trial.state == "done" or "stopped_at" in trial.outcome:
        return 0
    return EXIT_CODES[(trial.outcome.get("kind") or "failed") if trial.state == "failed" else "cancelled"]


def _until_ended(session: CliSession, store: Store, sweep_id: str, name: str, waits: bool) -> RunState:
    """What was left of an earlier attempt counts only once somebody drives the sweep, or nobody comes; of a
    sweep whose end was seen nobody needs to."""
    from mlpipe.api.watch import Watcher
    from mlpipe.cli.outcome import describe
    from mlpipe.store import leases, runs, sweeps

    run_id, driven, was_driven = sweeps.trial_run_id(sweep_id, name), time.monotonic(), False
    watcher: Watcher | None = None
    try:
        while True:
            waited = time.monotonic() - driven
            sweep = runs.read_run(store, sweep_id) if store.exists(f"runs/{sweep_id}/run.json") else None
            if sweep is not None:
                _check(store, sweep, name)
                ended = sweep.stages[name].state in _ENDED
                known = was_driven or not waits or waited > _REOPEN_SECONDS
                is_over = sweep.state in runs.RUN_ENDED and known
                if ended and (sweep.state in ("running", "done") or is_over):
                    return sweep
                if leases.lease_is_live(sweep.driver):
                    driven, was_driven = time.monotonic(), True
                if sweep.stages[name].state == "running" and store.exists(f"runs/{run_id}/run.json"):
                    run = runs.read_run(store, run_id)
                    watcher = watcher or Watcher(session, store, run, None, describe)
                    watcher.watch(run)
            if waited > (patience := _DRIVER_SECONDS if waits else 0.0):
                raise SubmitError(
                    f"nobody has driven sweep {sweep_id} for {patience:.0f} s"
                    if waits
                    else f"trial {name} has not ended, and nobody drives sweep {sweep_id} any more",
                    where=store.url,
                    hint=f"go on with mlpipe sweep --resume {sweep_id}",
                    kind="infrastructure",
                )
            time.sleep(_LOOK_SECONDS)
    finally:
        if watcher is not None:
            watcher.close()


def _check(store: Store, sweep: RunState, name: str) -> None:

    if not sweep.is_sweep:
        raise StoreError(f"{sweep.run_id} is a run, not a sweep", where=store.url, kind="input")
    if name not in sweep.stages:
        raise StoreError(
            f"sweep {sweep.run_id} has no trial {name!r}",
            where=store.url,
            hint=f"it has {', '.join(sweep.stages)}",
            kind="input",
        )
