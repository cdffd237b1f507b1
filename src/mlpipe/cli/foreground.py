"""Drives a run in this process: progress on standard error, the summary at the end, the exit code."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType
from typing import TYPE_CHECKING

from mlpipe._core.errors import EXIT_CODES
from mlpipe.api import driving
from mlpipe.api.signals import heard
from mlpipe.api.watch import Watcher
from mlpipe.cli import outcome
from mlpipe.cli.session import CliSession

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.submit.driver import DriveOptions
    from mlpipe.submit.executor import StopRequest

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def drive_here(
    session: CliSession,
    store: Store,
    run_id: str,
    options: DriveOptions | None = None,
) -> int:
    """Drive `run_id` until it has ended; the exit code (for followers: 0, they know). A signal once: save and
    stop. Twice: stop at once."""
    from mlpipe.submit.driver import DriveOptions

    options = options or DriveOptions()
    watcher = _watcher(session, store, run_id)
    driven = driving.drive_here(watcher, store, run_id, options, terminal=session, signals=_STOPPING)
    run, report = driven.run, driven.report
    session.result({**outcome.document(store, run), "report": report}, outcome.summary(store, run, report))
    if options.for_followers:
        return 0
    return EXIT_CODES["interrupted"] if driven.interrupted else outcome.exit_code(run, options.only)


def drive_for_backend(session: CliSession, store: Store, run_id: str, options: DriveOptions) -> int:
    """What a driver does that is its backend's own object, with its seal. A signal lets go of the run, which
    the next driver takes over; the exit code says whether there must be one, not how the run ended."""
    from mlpipe.store import runs
    from mlpipe.submit.driver import drive
    from mlpipe.submit.executor import StopRequest

    stop = StopRequest()

    def let_go(number: int, _: FrameType | None) -> None:
        stop.request("detached", f"the driver got {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, let_go)
    watcher = _watcher(session, store, run_id)
    try:
        run = drive(store, run_id, options, stop=stop, watch=watcher.watch)
    finally:
        watcher.close()
    if stop.kind == "detached" and run.state not in runs.RUN_ENDED:
        return EXIT_CODES["infrastructure"]
    driving.report_of(session, store, run)
    return 0


def signals(stop: StopRequest) -> AbstractContextManager[None]:
    """Within, a signal asks `stop` once; a second one interrupts."""
    return heard(_STOPPING, stop)


def _watcher(session: CliSession, store: Store, run_id: str) -> Watcher:
    from mlpipe.store import runs

    return Watcher(session, store, runs.read_run(store, run_id), describe=outcome.describe)
