"""Drives a run in this process: says how it goes, makes signals into a stop, writes the report."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlpipe._core.errors import Interrupt, MlpipeError
from mlpipe.api.signals import heard
from mlpipe.api.watch import Lines, Terminal, Watcher

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.driver import DriveOptions


@dataclass(frozen=True)
class Driven:
    """How the run stands. `interrupted`: by Ctrl-C. `report`: where it lies."""

    run: RunState
    interrupted: bool
    report: str | None


def drive_here(
    watcher: Watcher,
    store: Store,
    run_id: str,
    options: DriveOptions,
    *,
    terminal: Terminal,
    signals: Sequence[signal.Signals] = (),
) -> Driven:
    """Until the run has ended. One of `signals` once: it saves and stops. Twice: at once. Outside the main
    thread, where Python takes no signals, there must be none. Raises what `submit.driver.drive` raises."""
    from mlpipe.submit.driver import drive
    from mlpipe.submit.executor import StopRequest

    stop = StopRequest()
    with heard(signals, stop):
        try:
            run = drive(store, run_id, options, stop=stop, watch=watcher.watch, note=terminal.note)
        finally:
            watcher.close()
    return Driven(run, stop.kind == "interrupted", report_of(terminal, store, run))


def drive(store: Store, run_id: str, options: DriveOptions, lines: Lines) -> None:
    """In this process, until the run has ended. Raises KeyboardInterrupt after Ctrl-C."""
    from mlpipe.store.runs import read_run

    is_main = threading.current_thread() is threading.main_thread()
    watcher = Watcher(lines, store, read_run(store, run_id))
    signals = (signal.SIGINT,) if is_main else ()
    driven = drive_here(watcher, store, run_id, options, terminal=lines, signals=signals)
    if driven.interrupted:
        lines.note(f"run {run_id} was stopped; go on with mlpipe.Run({run_id!r}).resume()")
        raise Interrupt


def report_of(terminal: Terminal, store: Store, run: RunState) -> str | None:
    """Where the report lies. What ran here teaches how fast this machine is. That it cannot be written must
    not turn a trained model into a failure."""
    from mlpipe.api.reporting import view_of_page
    from mlpipe.observe.report import write_report
    from mlpipe.plan.hardware import knows_machine
    from mlpipe.submit import backends

    if all(stage.attempt == 0 for stage in run.stages.values()):
        return None
    try:
        view = view_of_page(store, run.run_id)
        report = write_report(store, view)
        backend = backends.of_run(run)
        if knows_machine() and not (backend.outlives_driver or backend.trains_elsewhere):
            from mlpipe.submit.measuring import learn

            learn(view)
        return report
    except (MlpipeError, OSError) as error:
        terminal.note(f"no report: {error}")
        return None
