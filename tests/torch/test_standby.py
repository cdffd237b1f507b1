"""The process that measures a core unasked, and of which launchers begin, as it is: two precisions, plausible
figures; launchers that are seen, fail and end as any other."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from kit import plans
from kit.command_runs import until

from mlpipe._core import environment
from mlpipe.plan import machine
from mlpipe.store.open import open_store
from mlpipe.store.outcome import read_outcome
from mlpipe.submit import process
from mlpipe.submit.measuring import _figures
from mlpipe.submit.standby import Begun, Standby, Standbys

pytestmark = pytest.mark.torch
_GUARD_SECONDS = 600.0


def of_proc(pid: int, file: str) -> list[str]:
    return Path(f"/proc/{pid}/{file}").read_text().split("\0")


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_what_has_measured_is_forked_into_launchers_and_their_torchrun(tmp_path: Path) -> None:
    lock = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    env = plans.environment()
    standby = Standby(env, lock)
    known = Standbys(standby)
    argv = [
        sys.executable,
        "-P",
        "-m",
        "mlpipe.train.launcher",
        "--scratch",
        str(tmp_path / "scratch"),
        "--plan",
    ]
    log, path = tmp_path / "output.log", tmp_path / "plan.json"
    told = env | {environment.DRIVER: "d", environment.STAGE: "train", environment.RUN_ID: "run"}

    def begin() -> Begun:
        assert known.find([*argv, str(path)], told | {"MALLOC_ARENA_MAX": "1"}) is None, "read at a start"
        assert known.find([sys.executable, "-c", "pass"], told) is None, "no launcher"
        assert known.find([*argv, str(path)], told) is standby
        begun = standby.begin([*argv, str(path)], env=told, folder=str(tmp_path), output=log)
        assert begun is not None, log.read_text()
        return begun

    try:
        assert standby.has_measured(_GUARD_SECONDS)
        figures = _figures(standby.figures.decode())
        assert figures.keys() == set(machine.PRECISIONS)
        for core in figures.values():
            assert 1e7 < core.matmul_flops < 1e14  # a hundred times slower than any machine is plausible, too
            assert 1e-4 < core.passes_seconds < 1e3

        wrong = begin()
        until(lambda: wrong.poll() is not None, "the launcher without a plan has ended", _GUARD_SECONDS)
        assert wrong.poll() == 2
        assert log.read_text().startswith(f"error: {path}: [Errno 2] No such file")

        tokens = plans.write_tokens(tmp_path / "tokens")
        plan = plans.train_plan(tmp_path / "store", tokens, world_size=1, steps=1_000_000, every=1_000_000)
        path.write_text(plan.to_json())
        launcher = begin()
        assert known.find([*argv, str(path)], told) is None, "another training waits for none"
        records = tmp_path / "store" / plan.attempt_key / "records" / "rank-0.jsonl"

        def steps() -> bool:
            assert launcher.poll() is None, log.read_text()
            return records.exists() and '"kind":"step"' in records.read_text().replace(" ", "")

        until(steps, "a first step", _GUARD_SECONDS)
        (rank,) = map(int, [(tmp_path / "scratch" / "pid-0-0").read_text().split()[0]])
        torchrun = parent(parent(rank))
        assert parent(torchrun) == launcher.pid
        assert of_proc(launcher.pid, "cmdline")[: len(argv)] == argv
        assert of_proc(torchrun, "cmdline")[1:4] == ["-P", "-m", "mlpipe.train.torchrun"]
        with open(
            f"/proc/{torchrun}/maps"
        ) as maps:  # by which torch, a new one would have loaded it elsewhere
            mapped = {line.split()[0] for line in maps if "libtorch_cpu" in line}
        with open(f"/proc/{parent(launcher.pid)}/maps") as maps:
            assert mapped == {line.split()[0] for line in maps if "libtorch_cpu" in line} != set()
        left = {launcher.pid, torchrun, rank}
        assert left <= set(process.members("d", "train", "run")), "found as what a dead driver leaves"
        assert parent(launcher.pid) not in process.members("d")

        os.kill(parent(launcher.pid), signal.SIGKILL)  # as it dies with its driver
        until(lambda: not process.members("d"), "all has ended", _GUARD_SECONDS)
        until(lambda: launcher.poll() is not None, "whoever has it now has reaped it", _GUARD_SECONDS)
        assert launcher.poll() == -signal.SIGKILL
        outcome = read_outcome(open_store(str(tmp_path / "store")), f"{plan.attempt_key}/outcome.json")
        assert outcome is not None
        assert outcome.outcome == "saved", "an orphaned launcher saves"
        assert json.loads((tmp_path / "scratch" / "outcome-0.json").read_text())["outcome"] == "saved"
        assert known.find([*argv, str(path)], told) is None
        assert standby.begin(argv, env=told, folder=str(tmp_path), output=log) is None
    finally:
        standby.close()
