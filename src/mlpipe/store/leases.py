"""Who drives a run: a lease in run.json, taken, renewed and let go by conditional PUT."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

from mlpipe._core import environment
from mlpipe._core.errors import StoreError
from mlpipe._core.processes import ProcessId, is_alive, this_process
from mlpipe.store.base import Store
from mlpipe.store.runs import RUN_ENDED, WAITS_FOR_STAGES, Lease, RunState, update_run, write_index_key

# No driver takes one for so long, whatever time zone its clock is taken for: it was made up.
_LONGEST_SECONDS = 86400.0
CLOCKS_SECONDS = 3600.0  # by which those of two machines may differ
_RESTART_SECONDS = 120.0  # for a cluster to start a driver in place of one that let go


class DeletionError(StoreError):
    """Checkpoints of the run are being deleted: nobody drives it, or may."""


def take_lease(
    store: Store, run_id: str, holder: str, seconds: float, *, dead: str | None = None, deletes: bool = False
) -> RunState:
    """Makes `holder` the run's driver for `seconds`, or, where it `deletes`, the one who deletes checkpoints
    of it. One whose lease has expired, whose process or container has ended, or that is known to be `dead`,
    is taken over. Raises StoreError (input) when another holder is alive."""
    own = this_process()
    pod, pod_uid = (os.environ.get(name, "") for name in (environment.POD_NAME, environment.POD_UID))

    def change(run: RunState) -> RunState:
        lease = run.driver
        if lease is not None and lease.holder not in (holder, dead) and is_driven(store, run):
            left = f"; if that machine is lost, wait for {max(0.0, lease.expires - time.time()):.0f} s"
            raise StoreError(
                f"run {run_id} is driven by process {lease.pid} on {lease.host}",
                where=store.url,
                hint=f"see how it goes: mlpipe status {run_id}; stop it first: mlpipe cancel {run_id}"
                + ("" if is_alive(_process(lease)) else left),  # one that lives renews it
                kind="input",
            )
        new = Lease(
            holder,
            socket.gethostname(),
            own.pid,
            time.time() + seconds,
            own.namespace,
            own.started,
            pod,
            pod_uid,
            deletes,
        )
        return replace(run, driver=new)

    run = update_run(store, run_id, change)
    write_index_key(store, run)
    return run


def renew_lease(store: Store, run_id: str, holder: str, seconds: float) -> RunState:
    """Raises StoreError when the lease was lost to another driver: stop what you drive."""

    def change(run: RunState) -> RunState:
        if run.driver is None or run.driver.holder != holder:
            raise StoreError(f"the lease on run {run_id} was lost", where=store.url)
        return replace(run, driver=replace(run.driver, expires=time.time() + seconds))

    return update_run(store, run_id, change)


def release_lease(store: Store, run_id: str, holder: str) -> RunState:
    """No error when it is somebody else's by now."""

    def change(run: RunState) -> RunState:
        ours = run.driver is not None and run.driver.holder == holder
        return replace(run, driver=None) if ours else run

    return update_run(store, run_id, change)


def lease_is_live(lease: Lease | None) -> bool:
    """Whether somebody holds the run, as far as can be told from here: see also `is_driven`."""
    if lease is None or not 0 <= lease.expires - time.time() <= _LONGEST_SECONDS:
        return False
    alive = is_alive(_process(lease))
    if alive is not None:
        return alive
    # of this very pod, but not of this container: that one has ended, and was started anew as ours
    return lease.pod_uid == "" or lease.pod_uid != os.environ.get(environment.POD_UID)


def is_driven(store: Store, run: RunState) -> bool:
    """Whether the run has a driver. Raises DeletionError (input) while its checkpoints are being deleted,
    after which it would have none."""
    lease = run.driver
    if lease is None or not lease_is_live(lease):
        return False
    if lease.deletes:
        raise DeletionError(
            f"checkpoints of run {run.run_id} are being deleted by process {lease.pid} on {lease.host}",
            where=store.url,
            hint="try again once that has ended",
            kind="input",
        )
    return True


def is_over_by_clock(lease: Lease) -> bool:
    """Whether it ended so lately that its holder may be alive, on a machine whose clock is another one, or on
    this one, whose clock has jumped."""
    late, alive = time.time() - lease.expires, is_alive(_process(lease))
    may_renew = alive is None or (alive and lease.pid != os.getpid())
    return 0 < late < CLOCKS_SECONDS and may_renew


def _process(lease: Lease) -> ProcessId:
    return ProcessId(lease.pid, lease.namespace, lease.started)


def undriven_since(run: RunState) -> float | None:
    """Unix seconds since which nobody drives a run that is under way, as far as its store tells; None where
    somebody does, or need not. In a place of its own another driver may be about to start."""
    if run.state in RUN_ENDED or run.message == WAITS_FOR_STAGES or lease_is_live(run.driver):
        return None
    since = run.updated if run.driver is None else min(run.driver.expires, time.time())
    return since if not run.place or time.time() - since > _RESTART_SECONDS else None
