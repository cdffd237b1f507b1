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
from dataclasses import replace
from pathlib import Path
from types import FrameType

from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.plan import Plan
from mlpipe.plan.process import fetch_inputs, main_of_stage
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.submit.command_gang import commit, variables, wait_for_others
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
    node = GangNode.from_environment()
    key = f"{plan.attempt_key}/{node.name('outcome', '.json')}"
    store.delete([key])  # of this node's pod before a restart of the gang
    ended = _work(store, plan, scratch, node, stop)
    code = _exit_code(ended)
    _store_outcome(store, key, ended, code, node.gang_restart)
    if ended.message:
        print(f"{ended.state}: {ended.message}", file=sys.stderr, flush=True)  # noqa: T201
    return code


def _work(store: Store, plan: Plan, scratch: Path, node: GangNode, stop: _StopSignal) -> Ended:
    if not fetch_inputs(store, plan, lambda: stop.on_signal(signal.SIGTERM, None)):
        return Ended("cancelled", "stopped before it began")
    executor = ProcessExecutor(store, driver=f"{socket.gethostname()}-{os.getpid()}", folder=os.getcwd())
    if (nodes := plan.launch.num_nodes) == 1:
        handle: ThreadedHandle = executor.start(plan, scratch)
    else:
        env = variables(node.index, nodes, node.rendezvous)
        handle = executor.start_node(plan, scratch, node.index, env)
    ended = _follow(handle, scratch / "output.log", stop, plan.launch.shutdown_seconds)
    if nodes > 1 and node.index == 0 and ended.state == "done":
        ended = _together(store, plan, node, stop, scratch / "output")
    return ended


def _together(store: Store, plan: Plan, node: GangNode, stop: _StopSignal, folder: Path) -> Ended:
    """Of the first node, whose own part is done."""
    try:
        others = wait_for_others(store, plan, node, lambda: stop.requested is not None)
        return others or commit(store, plan, folder)
    except MlpipeError as error:
        return Ended("failed", str(error), kind=error.kind)


class _StopSignal:
    """The command's handle hears it at once: where all processes are signalled, as on Slurm, a command may
    end well in that moment, and is not done for that."""

    def __init__(self) -> None:
        self.requested: float | None = None  # monotonic
        self.handle: ThreadedHandle | None = None

    def on_signal(self, _: int, __: FrameType | None) -> None:
        if self.requested is None:
            self.requested = time.monotonic()
            if self.handle is not None:
                self.handle.terminate()


def _follow(handle: ThreadedHandle, log: Path, stop: _StopSignal, shutdown_seconds: float) -> Ended:
    """The stage's own timeout is its driver's to watch, and the pod's deadline."""
    position, killed = 0, False
    stop.handle = handle
    if stop.requested is not None:
        handle.terminate()
    while True:
        ended = handle.poll()
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                position += sys.stdout.buffer.write(file.read())
                sys.stdout.buffer.flush()
        if ended is not None:
            return _told_together(ended, stop)
        if stop.requested is not None and not killed and time.monotonic() - stop.requested > shutdown_seconds:
            handle.kill()
            killed = True
        time.sleep(_POLL_SECONDS)


def _told_together(ended: Ended, stop: _StopSignal) -> Ended:
    """As Slurm does: whoever signals every process of a job stops its command, which has not failed."""
    if ended.state != "failed" or ended.exit_code is None:
        return ended
    if stop.requested is None:
        time.sleep(_POLL_SECONDS)  # the command may have heard it first
    if stop.requested is None:
        return ended
    return replace(
        ended, state="cancelled", message=f"stopped with all its processes: {ended.message}", kind=None
    )


def _exit_code(ended: Ended) -> int:
    if ended.state == "done":
        return 0
    return EXIT_CODES["cancelled"] if ended.state == "cancelled" else EXIT_CODES[ended.kind or "failed"]


def _store_outcome(store: Store, key: str, ended: Ended, exit_code: int, restarts: int) -> None:
    outcome = AttemptOutcome(
        "done" if ended.state == "done" else "failed",
        kind="cancelled" if ended.state == "cancelled" else ended.kind,
        message=ended.message,
        restarts=restarts,
        exit_code=exit_code,
        time=time.time(),
        details=ended.outcome,
    )
    write_outcome(store, key, outcome)


if __name__ == "__main__":
    sys.exit(main())
