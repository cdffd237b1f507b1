"""The follower's lease: who waits for a run, kept beside the driver's lease, so that the driver can tell a
run that was left on purpose from one whose follower died (an agent of Jenkins that was killed).

    runs/<run-id>/follower      {"holder", "expires"}, while somebody waits with `--wait`; last one wins

A follower that leaves takes it away. One that is terminated lets it be: another may take its place before it
expires, and if none does, `on_orphan` of the pipeline says what the driver does.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable

from mlpipe._core.errors import StoreError
from mlpipe._core.serial import read_json
from mlpipe.store.base import Store
from mlpipe.submit.executor import StopRequest

LEASE_SECONDS = 600.0  # enough for a new agent to be scheduled, pulled and started
_RENEW_SECONDS = 30.0
_LOOK_SECONDS = 10.0
_SILENT_SECONDS = 2 * _RENEW_SECONDS  # by the driver's own clock, which may have jumped past the other one's


class Following:
    """The lease of one who waits. Call `renew` as often as you like."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._key = _key(run_id)
        self._holder = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._renewed: float | None = None

    def renew(self) -> None:
        now = time.monotonic()
        if self._renewed is None or now - self._renewed > _RENEW_SECONDS:
            self._renewed = now
            lease = {"holder": self._holder, "expires": time.time() + LEASE_SECONDS}
            self._store.put(self._key, json.dumps(lease).encode())

    def leave(self) -> None:
        try:
            lease = read_json(self._store.get(self._key)) if self._store.exists(self._key) else {}
            if lease["holder"] == self._holder:
                self._store.delete([self._key])
        except (StoreError, ValueError, KeyError, TypeError):
            return  # it expires, and an error on its way out must not be hidden by this one


def cancel_orphans(store: Store, run_id: str, stop: StopRequest) -> Callable[[], None]:
    """For a driver to call as often as it likes: stops the walk once the follower's lease has expired
    and is not renewed."""
    looked = since = time.monotonic()
    seen = b""

    def look() -> None:
        nonlocal looked, since, seen
        if stop.kind is not None or time.monotonic() - looked < _LOOK_SECONDS:
            return
        looked = time.monotonic()
        try:
            if not store.exists(_key(run_id)):
                return
            lease = store.get(_key(run_id))
            if lease != seen:
                seen, since = lease, looked
            gone = time.time() > float(read_json(lease)["expires"]) and looked - since >= _SILENT_SECONDS
            if gone:
                store.delete([_key(run_id)])  # a resume begins without it
        except (StoreError, ValueError, KeyError, TypeError):
            return  # a store that is away for a while stops no training
        if gone:
            stop.request("cancelled", "whoever followed it is gone, and on_orphan is cancel")

    return look


def _key(run_id: str) -> str:
    return f"runs/{run_id}/follower"
