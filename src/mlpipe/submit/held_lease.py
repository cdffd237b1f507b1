"""The right to drive a run: taken by one driver at a time, renewed while it drives."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.store import leases, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import Lease, RunState

LEASE_SECONDS = 60.0
TAKEOVER_SECONDS = LEASE_SECONDS + 10.0  # for the lease of a driver that is gone to expire
_RENEW_SECONDS = 10.0
_SILENCE_SECONDS = 1.5 * _RENEW_SECONDS  # of who is taken for gone


class HeldLease:
    """The right to drive a run, renewed by a thread so that a long upload does not lose it."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        patience_seconds: float = 0.0,
        has_ended: Callable[[Lease], bool] = lambda lease: False,
        deletes: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`patience_seconds`: how long to wait for another's lease to expire. `has_ended`: whether others
        know that its holder is dead. `deletes`: see `Lease`. `note`: takes a line on what is waited for."""
        self._patience_seconds = patience_seconds
        self._has_ended = has_ended
        self._deletes = deletes
        self._note = note
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.store = store
        self._run_id = run_id
        self._released = threading.Event()
        self._lost: str | None = None
        self._watched: tuple[Lease | None, float] = None, 0.0  # another's, and since when it is as it is
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    def __enter__(self) -> HeldLease:
        deadline = time.monotonic() + self._patience_seconds
        dead: str | None = None
        while True:
            try:
                self._await_silence()
                leases.take_lease(
                    self.store, self._run_id, self.holder, LEASE_SECONDS, dead=dead, deletes=self._deletes
                )
                break
            except StoreError as error:
                if time.monotonic() >= deadline:
                    raise
                former = runs.read_run(self.store, self._run_id).driver if error.kind == "input" else None
                dead = former.holder if former is not None and self._has_ended(former) else None
                if dead is None:
                    time.sleep(1.0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._released.set()
        try:
            leases.release_lease(self.store, self._run_id, self.holder)
        except StoreError:
            return  # it expires by itself, and an error on its way out must not be hidden by this one

    def _await_silence(self) -> None:
        """A lease that is over by our clock may be renewed all the same: one that ended lately is taken once
        it was watched for as long as a renewal takes. Raises StoreError (input) where it was renewed, or
        taken by another: somebody is alive."""
        while True:
            lease, before = runs.read_run(self.store, self._run_id).driver, self._watched[0]
            if lease != before:
                self._watched = lease, time.monotonic()
            if lease is None or not leases.is_over_by_clock(lease) or self._has_ended(lease):
                return
            if before is not None and lease != before:
                raise StoreError(
                    f"run {self._run_id} is driven by process {lease.pid} on {lease.host}, whose clock "
                    "and this machine's differ",
                    where=self.store.url,
                    hint="set both by NTP; nothing was started",
                    kind="input",
                )
            if time.monotonic() - self._watched[1] > _SILENCE_SECONDS:
                return
            if lease != before:
                self._note(
                    f"run {self._run_id} was driven by process {lease.pid} on {lease.host} up to "
                    f"{time.time() - lease.expires:.0f} s ago by this machine's clock: watching for "
                    f"{_SILENCE_SECONDS:.0f} s whether it still is"
                )
            time.sleep(1.0)

    def check(self) -> None:
        """Raises SubmitError once the lease is lost."""
        if self._lost is not None:
            raise SubmitError(
                f"this driver lost the lease on run {self._run_id}: {self._lost}",
                hint=f"see who drives it: mlpipe status {self._run_id}; go on: mlpipe resume {self._run_id}",
            )

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._released.wait(_RENEW_SECONDS):
            try:
                leases.renew_lease(self.store, self._run_id, self.holder, LEASE_SECONDS)
                renewed = time.monotonic()
            except StoreError as error:
                if self._is_taken() or time.monotonic() - renewed > LEASE_SECONDS:
                    self._lost = str(error)
                    return

    def _is_taken(self) -> bool:
        try:
            driver = runs.read_run(self.store, self._run_id).driver
        except StoreError:
            return False
        return driver is None or driver.holder != self.holder


def update_held(store: Store, run_id: str, holder: str, change: Callable[[RunState], RunState]) -> RunState:
    """Only the holder of the lease writes: one that was paused past its lease finds out here. Raises
    SubmitError."""

    def fenced(run: RunState) -> RunState:
        if run.driver is None or run.driver.holder != holder:
            raise SubmitError(f"run {run.run_id} has another driver by now; this one stops")
        return change(run)

    return runs.update_run(store, run_id, fenced)
