"""A stage's processes die with their driver, and only they are ever signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlpipe._core import environment
from mlpipe.submit import process

pytestmark = pytest.mark.unit


def until(condition, what: str, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return found


def test_a_child_dies_when_its_parent_is_killed(tmp_path: Path):
    script = f"""
import os, signal, time
from pathlib import Path
from mlpipe.submit import process
env = {{**os.environ, "MLPIPE_DRIVER": "lease-a"}}
child = process.spawn(["sleep", "300"], env=env, folder=".", output=Path({str(tmp_path / "log")!r}),
                      death_signal=signal.SIGKILL)
print(child.pid, flush=True)
time.sleep(300)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    until(lambda: Path(f"/proc/{pid}/comm").read_text() == "sleep\n", "exec")
    parent.kill()
    parent.wait()
    until(lambda: pid not in process.members("lease-a"), "the child to die")


def test_clear_ends_orphans_of_one_driver_and_leaves_the_other_alone(tmp_path: Path):
    def start(lease: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, environment.DRIVER: lease, "MLPIPE_RUN_ID": "r"}
        # The grandchild leaves its session and ignores SIGTERM: no process group would find it.
        argv = ["sh", "-c", "trap '' TERM; setsid sleep 300 & wait"]
        return process.spawn(
            argv, env=env, folder=str(tmp_path), output=tmp_path / lease, death_signal=signal.SIGKILL
        )

    mine, other = start("lease-mine"), start("lease-other")
    try:
        for lease in ("lease-mine", "lease-other"):
            until(lambda lease=lease: len(process.members(lease)) == 2, "the grandchild")
        # the driver's name is read from a store, where somebody may have written that of another run's
        assert process.clear("lease-mine", run_id="s", grace_seconds=0.0) == 0
        assert process.clear("lease-mine", run_id="r", grace_seconds=0.1) == 2
        assert process.members("lease-mine") == []
        assert len(process.members("lease-other")) == 2
    finally:
        process.clear("lease-other", run_id="r", grace_seconds=0.0)
        mine.wait()
        other.wait()


def test_members_can_be_narrowed_to_a_stage(tmp_path: Path):
    env = {**os.environ, environment.DRIVER: "lease-s", "MLPIPE_STAGE": "train"}
    child = process.spawn(
        ["sleep", "300"], env=env, folder=str(tmp_path), output=tmp_path / "log", death_signal=signal.SIGKILL
    )
    try:
        # while the child becomes sleep, its environment is empty
        until(lambda: process.members("lease-s", "train") == [child.pid], "the child")
        assert process.members("lease-s", "evaluate") == []
    finally:
        process.send([child.pid], signal.SIGKILL)
        child.wait()


def test_a_program_that_cannot_be_executed_says_so(tmp_path: Path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF not really")
    broken.chmod(0o755)
    child = process.spawn(
        [str(broken)],
        env=os.environ,
        folder=str(tmp_path),
        output=tmp_path / "log",
        death_signal=signal.SIGKILL,
    )
    assert child.wait(timeout=300) == 126
    assert "cannot run" in (tmp_path / "log").read_text()
