"""Drives a run in this process: progress on standard error, signals into a stop, the summary at the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe.cli import outcome
from mlpipe.cli.follow import Watcher
from mlpipe.cli.session import Interrupt, Session

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.driver import DriveOptions
    from mlpipe.submit.executor import StopRequest


def drive_here(
    session: Session,
    store: Store,
    run_id: str,
    options: DriveOptions | None = None,
) -> int:
    """Drive `run_id` until it has ended; the exit code (for followers: 0, they know). A signal once: save and
    stop. Twice: stop at once."""
    from mlpipe.store import runs
    from mlpipe.submit.driver import DriveOptions, drive
    from mlpipe.submit.executor import StopRequest

    options = options or DriveOptions()
    stop = StopRequest()
    watcher = Watcher(session, store, runs.read_run(store, run_id))
    with signals(stop):
        try:
            run = drive(store, run_id, options, stop=stop, watch=watcher.watch)
        finally:
            watcher.close()
    report = report_of(session, store, run)
    session.result({**outcome.document(store, run), "report": report}, outcome.summary(store, run, report))
    if options.for_followers:
        return 0
    return EXIT_CODES["interrupted"] if stop.kind == "interrupted" else outcome.exit_code(run, options.only)


def drive_for_backend(session: Session, store: Store, run_id: str, options: DriveOptions) -> int:
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
    watcher = Watcher(session, store, runs.read_run(store, run_id))
    try:
        run = drive(store, run_id, options, stop=stop, watch=watcher.watch)
    finally:
        watcher.close()
    if stop.kind == "detached" and run.state not in runs.RUN_ENDED:
        return EXIT_CODES["infrastructure"]
    report_of(session, store, run)
    return 0


def report_of(session: Session, store: Store, run: RunState) -> str | None:
    """Where the report lies. That it cannot be written must not turn a trained model into a failure."""
    from mlpipe.observe.report import write_report
    from mlpipe.observe.runview import view_run

    if all(stage.attempt == 0 for stage in run.stages.values()):
        return None
    try:
        return write_report(store, view_run(store, run.run_id))
    except (MlpipeError, OSError) as error:
        session.note(f"no report: {error}")
        return None


@contextmanager
def signals(stop: StopRequest) -> Iterator[None]:
    """Within, a signal asks `stop` once; a second one interrupts."""

    def handle(number: int, _: FrameType | None) -> None:
        if stop.kind is not None:
            raise Interrupt
        name = signal.Signals(number).name
        stop.request("interrupted" if number == signal.SIGINT else "cancelled", f"stopped by {name}")
        again = "Ctrl-C again" if number == signal.SIGINT else f"{name} again"
        # not print: the signal may have come in the middle of one
        os.write(2, f"\nstopping: saving at the next step ({again}: at once)\n".encode())

    former = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means what it says
            former[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, action in former.items():
            signal.signal(number, action)
