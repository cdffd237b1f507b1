"""`python -m mlpipe.submit.pod --plan PLAN --scratch DIR`: PID 1 of the pod of a stage that runs a command.

Does there what the backend `local` does on a laptop, and leaves what a launcher leaves: the log and
outcome.json in the store, the same lines on stdout, and one of our exit codes. A SIGTERM ends the command.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from mlpipe._core.errors import EXIT_CODES
from mlpipe.plan.plan import Plan
from mlpipe.plan.process import fetch_inputs, main_of_stage
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import ThreadedHandle
from mlpipe.submit.process_executor import ProcessExecutor

_POLL_SECONDS = 0.1


def main(argv: list[str] | None = None) -> int:
    return main_of_stage("mlpipe.submit.pod", __doc__, argv, _run)


def _run(plan: Plan, _: Path, scratch: Path) -> int:
    stop = _StopSignal()
    signal.signal(signal.SIGTERM, stop.on_signal)
    store = open_store(plan.store_url)
    fetch_inputs(store, plan)
    executor = ProcessExecutor(store, driver=f"{socket.gethostname()}-{os.getpid()}", folder=os.getcwd())
    ended = _follow(executor.start(plan, scratch), scratch / "output.log", stop, plan.launch.shutdown_seconds)
    code = _exit_code(ended)
    _store_outcome(store, plan, ended, code)
    if ended.message:
        print(f"{ended.state}: {ended.message}", file=sys.stderr, flush=True)  # noqa: T201
    return code


class _StopSignal:
    def __init__(self) -> None:
        self.requested: float | None = None  # monotonic

    def on_signal(self, _: int, __: FrameType | None) -> None:
        self.requested = self.requested or time.monotonic()


def _follow(handle: ThreadedHandle, log: Path, stop: _StopSignal, shutdown_seconds: float) -> Ended:
    """The stage's own timeout is its driver's to watch, and the pod's deadline."""
    position, terminated, killed = 0, False, False
    while True:
        ended = handle.poll()
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                position += sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
        if ended is not None:
            return ended
        if stop.requested is not None and not terminated:
            handle.terminate()
            terminated = True
        if stop.requested is not None and not killed and time.monotonic() - stop.requested > shutdown_seconds:
            handle.kill()
            killed = True
        time.sleep(_POLL_SECONDS)


def _exit_code(ended: Ended) -> int:
    if ended.state == "done":
        return 0
    return EXIT_CODES["cancelled"] if ended.state == "cancelled" else EXIT_CODES[ended.kind or "failed"]


def _store_outcome(store: Store, plan: Plan, ended: Ended, exit_code: int) -> None:
    outcome = AttemptOutcome(
        "done" if ended.state == "done" else "failed",
        kind="cancelled" if ended.state == "cancelled" else ended.kind,
        message=ended.message,
        exit_code=exit_code,
        time=time.time(),
        details=ended.outcome,
    )
    write_outcome(store, f"{plan.attempt_key}/outcome.json", outcome)


if __name__ == "__main__":
    sys.exit(main())
