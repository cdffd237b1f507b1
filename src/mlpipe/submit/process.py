"""Processes of stages: each leads its own session, dies with its driver, and writes into a file.

Every descendant of a stage carries MLPIPE_DRIVER=<the driver's lease> in its environment. That is how
what a dead driver left behind is found, and nothing else is ever signalled: a pid may have been given
to a stranger since, a random lease name cannot.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.errors import SubmitError

_CHILD = str(Path(__file__).with_name("child.py"))


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    folder: str,
    output: Path,
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start `argv` without a shell in `folder`. It gets `death_signal` when the calling thread ends."""
    with output.open("ab") as out:
        return subprocess.Popen(
            dies_with_us(argv, death_signal),
            env=dict(env),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def dies_with_us(argv: Sequence[str], death_signal: signal.Signals) -> list[str]:
    """argv of a child that becomes `argv`, and gets the signal when the thread that started it ends."""
    return [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), str(int(death_signal)), *argv]


def members(
    driver: str, stage: str | None = None, run_id: str | None = None, *, node: int | None = None
) -> list[int]:
    """Living processes whose environment says that `driver` started them, for `stage` of `run_id`, on `node`
    of a command's several."""
    wanted = {
        environment.DRIVER: driver,
        environment.STAGE: stage,
        environment.RUN_ID: run_id,
        environment.NODE_RANK: None if node is None else str(node),
    }
    marks = {f"{name}={value}".encode() for name, value in wanted.items() if value is not None}
    pids = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry.name}/environ", "rb") as file:  # empty for a zombie
                if marks <= set(file.read().split(b"\0")):
                    pids.append(int(entry.name))
        except OSError:
            continue  # gone meanwhile, or another user's
    return pids


def send(pids: Sequence[int], signum: signal.Signals) -> None:
    """The signal to each process that is still there."""
    for pid in pids:
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            continue


def clear(driver: str, *, run_id: str, grace_seconds: float) -> int:
    """Wait `grace_seconds` for what a dead driver left of `run_id` to save and leave, then SIGKILL it.
    Returns how many were found. (Launchers had SIGTERM from the kernel as the driver died; another would mean
    "at once". The driver's name comes from the store, where it may be that of another run's by now.)

    Raises SubmitError if some are still there 10 s after SIGKILL (stuck in the kernel).
    """
    pids = members(driver, run_id=run_id)
    if not pids:
        return 0
    deadline = time.monotonic() + grace_seconds
    while members(driver, run_id=run_id) and time.monotonic() < deadline:
        time.sleep(0.1)
    deadline = time.monotonic() + 10
    while left := members(driver, run_id=run_id):
        send(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise SubmitError(
                f"processes {left} of the former driver {driver} do not die",
                hint="they hang in the kernel (a network disk?); resume when they are gone",
            )
        time.sleep(0.05)
    return len(pids)
