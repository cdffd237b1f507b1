"""Waits for a run, or for one of its stages: what `submit --wait` and `resume` do while another drives it."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

from mlpipe._core.errors import EXIT_CODES, Interrupt, SubmitError
from mlpipe.cli.session import CliSession

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.adopt import DriveRequest

_MAX_TAKEOVERS = 5  # by one who follows; a driver that ended just before it was asked counts as well
_LOOK_SECONDS = 3.0  # between two looks for a driver that has no lease
_DRIVER_SECONDS = 900.0  # for it to be scheduled, pulled and started


def say_detached(session: CliSession, run_id: str) -> int:
    """After Ctrl-C; the exit code."""
    session.complain(
        f"detached; run {run_id} goes on. See it with `mlpipe status {run_id}` or "
        f"`mlpipe logs -f {run_id}`, stop it with `mlpipe cancel {run_id}`"
    )
    return EXIT_CODES["interrupted"]


def wait_for(session: CliSession, request: DriveRequest) -> int:
    """Until the run, or its stage that is asked for, has ended; its exit code. A stage that is still to be
    run when nobody drives it gets a driver."""
    from mlpipe.api.driving import report_of
    from mlpipe.api.watch import Watcher
    from mlpipe.cli import outcome
    from mlpipe.store import leases, runs, wanted
    from mlpipe.submit.adopt import LET_GO_SECONDS
    from mlpipe.submit.follower import Following

    store, run_id, only = request.store, request.run_id, request.only
    will_be_driven = _WillBeDriven(session, request)
    terminated = False

    def detach(*_: object) -> None:  # as Ctrl-C does, but whoever comes next may take our place
        nonlocal terminated
        terminated = True
        raise Interrupt

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, detach)
    run = runs.read_run(store, run_id, known=True)
    watcher = Watcher(session, store, run, only, outcome.describe)
    following = Following(store, run_id)
    before = run.state
    over_at: float | None = None
    num_takeovers = 0
    try:
        while True:
            watcher.watch(run)
            following.renew()
            over = _is_over(store, run, only)
            # one who deletes checkpoints is waited for where a driver must start after it
            driven = leases.lease_is_live(run.driver) and not (over and run.driver and run.driver.deletes)
            if over and only is not None:
                # A driver lets go when it has written how the run stands, unless others keep it.
                over_at = over_at or time.monotonic()
                driven = driven and not run.is_under_way and time.monotonic() - over_at < LET_GO_SECONDS
            if not driven and (over or not will_be_driven(run)):
                if only is not None and run.state == "cancelled" != before:  # just before we asked
                    wanted.take(store, run_id, [only])
                    over = True
                if over or only is None or num_takeovers == _MAX_TAKEOVERS:
                    break
                if num_takeovers:
                    session.note(f"run {run_id} has no driver: it gets one")
                num_takeovers += 1
                request.start_driver()
            time.sleep(0.5)
            run = runs.read_run(store, run_id, known=True)
        watcher.watch(run)
    finally:
        watcher.close()
        if not terminated:
            following.leave()
    if not over:
        raise SubmitError(
            f"the driver of run {run_id} is gone and the run has not ended",
            hint=f"go on with mlpipe resume {run_id}{outcome.store_option(store)}",
        )
    report = report_of(session, store, run)  # the driver writes the same one, a moment later
    session.result({**outcome.document(store, run), "report": report}, outcome.summary(store, run, report))
    return outcome.exit_code(run, only)


def _is_over(store: Store, run: RunState, only: str | None) -> bool:
    from mlpipe.store import runs, wanted

    ended = run.state in runs.RUN_ENDED
    if only is None:
        return ended
    state = run.stages[only].state
    if state == "done":
        return True
    return (ended or state in ("failed", "cancelled", "skipped")) and not wanted.is_asked(
        store, run.run_id, only
    )


class _WillBeDriven:
    """Whether a run that no live driver holds will have one again; says meanwhile why it has none."""

    def __init__(self, session: CliSession, request: DriveRequest) -> None:
        self._session, self._request = session, request
        self._looked = self._driverless = 0.0
        self._said = ""

    def __call__(self, run: RunState) -> bool:
        request, now = self._request, time.monotonic()
        if not request.backend.has_own_driver:
            return False
        if now - self._looked < _LOOK_SECONDS:
            return True
        self._driverless = now if now - self._looked > 3 * _LOOK_SECONDS else self._driverless
        self._looked = now
        if not request.backend.driver_is_alive(run.run_id, request.only):
            return False
        reason = request.backend.why_undriven(request.store, run)
        if reason and reason != self._said:
            self._session.note(reason)
            self._said = reason
        if now - self._driverless > _DRIVER_SECONDS:
            raise SubmitError(
                f"the driver of run {run.run_id} did not start within {_DRIVER_SECONDS:.0f} s: {reason}",
                hint=f"it starts when it can; give it up with mlpipe cancel {run.run_id}",
            )
        return True
