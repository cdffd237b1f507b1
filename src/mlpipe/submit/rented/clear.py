"""Returns what a driver that is gone has rented; its machines save before."""

from __future__ import annotations

import json
import time

from mlpipe._core.errors import MlpipeError
from mlpipe.store.runs import RunState
from mlpipe.submit.rented import machine
from mlpipe.submit.rented.handle import traffic_usd_of
from mlpipe.submit.rented.market import Market

_LOOK_SECONDS = 2.0
_KEPT_SECONDS = 60.0  # of the time, for returning


def clear(market: Market, run: RunState, *, timeout_seconds: float) -> None:
    """Raises SubmitError where the vendor does not take one back, or does not answer: nothing is rented
    before that is known."""
    held, store = market.rentals, market.store
    open_rentals = [one for one in held.all() if one.ended is None]
    ours = held.ours(market.vendor.machines())
    stages = {
        tuple(one.label.removeprefix(held.prefix).split("/")[:2]) for one in ours if one.state == "runs"
    }
    keys = [f"runs/{run.run_id}/stages/{stage}/attempt-{attempt}" for stage, attempt in stages]
    for key in keys:
        store.put(f"{key}/{machine.LEASE}", json.dumps({"beat": time.time(), "stop": True}).encode())
    deadline = time.monotonic() + timeout_seconds - _KEPT_SECONDS
    while time.monotonic() < deadline and not all(_has_ended(market, key) for key in keys):
        time.sleep(_LOOK_SECONDS)
    for rental in open_rentals:
        stage, attempt = rental.label.removeprefix(held.prefix).split("/")[:2]
        key = f"runs/{run.run_id}/stages/{stage}/attempt-{attempt}"
        held.give_back(rental, traffic_usd=traffic_usd_of(store, key, rental))
    held.return_others("")


def _has_ended(market: Market, key: str) -> bool:
    try:
        return market.store.exists(f"{key}/outcome.json")
    except MlpipeError:
        return False
