"""Stops a run, whoever drives it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from mlpipe._core.files import user_name
from mlpipe.store import runs
from mlpipe.submit import backends
from mlpipe.submit.driver import cancel
from mlpipe.submit.sweeps.cancel import cancel_sweep, cancel_trial, waiting_trial

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.delegate import Requested
    from mlpipe.submit.submission import Console

PATIENCE_SECONDS = 660.0  # for the stages to save and end


def stop_run(
    store: Store, run_id: str, console: Console, *, timeout_seconds: float = PATIENCE_SECONDS
) -> RunState | Requested | None:
    """The run as it stands then. Where a build was asked for it and has not made it, the request, which is
    given up; None for an id that was claimed and never begun, and is free again. Raises SubmitError when
    `timeout_seconds` are over."""
    if (request := backends.requested(store, run_id)) is not None:
        ended = request.abort(console, timeout_seconds)
        if ended and not store.exists(f"runs/{run_id}/run.json"):
            request.give_up()
            return request
    if runs.clear_claim(store, run_id):
        return None
    who = f"cancelled by {user_name()} on {socket.gethostname()}"
    if (trial := waiting_trial(store, run_id)) is not None:
        return cancel_trial(store, *trial, who, timeout_seconds=timeout_seconds)
    if runs.read_run(store, run_id).is_sweep:
        return cancel_sweep(store, run_id, who, timeout_seconds=timeout_seconds)
    return cancel(store, run_id, who, timeout_seconds=timeout_seconds, note=console.note)
