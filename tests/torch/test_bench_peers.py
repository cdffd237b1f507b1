"""mlpipe and a raw script take turns and learn the same thing. No figure of a quick run means anything."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.plans import write_tokens
from kit.warm import Popen

from benchmarks import launch
from benchmarks.peers import chats, rates, results, sides
from benchmarks.validated import __main__ as validated

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


def test_a_validated_checkpoint_of_each_side_is_found_and_its_lines_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Both sides, and ranks of both, are forks of processes that have imported torch."""

    def run(argv: list[str], *, env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        ours = Path(argv[0]).name == "mlpipe"
        argv = [sys.executable, "-m", "mlpipe.cli", *argv[1:]] if ours else argv
        kind = "cli" if ours else "torchrun"
        env |= {"KIT_WARM": "1"}
        with (tmp_path / "output").open("w+") as output:
            with Popen(kind, argv, cwd=ROOT, env=env, stdout=output, stderr=output) as side:
                code = side.wait(600)
            output.seek(0)
            return subprocess.CompletedProcess(argv, code, output.read(), "")

    monkeypatch.setattr(validated, "subprocess", SimpleNamespace(run=run))
    argv = ["validated", "--quick", "--only", "cnn", "--peers", "raw DDP", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert validated.main() == 0
    rows = json.loads((tmp_path / "validated.json").read_text())["figures"]
    assert {row["unit"]: row["goal"] for row in rows} == {"s": None, "images/s": None, "lines": None}
    lines = next(row for row in rows if row["unit"] == "lines")
    assert (lines["ours"], lines["best_peer"]) == (15, 58)
    assert all(row["ours"] > 0 and row["best_peer"] > 0 for row in rows)


def test_sides_take_turns_on_the_same_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Both torchruns, and ranks of both, are forks of a process that has imported torch."""
    warm = SimpleNamespace(
        Popen=partial(Popen, "torchrun"), DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    monkeypatch.setattr(sides, "subprocess", warm)
    monkeypatch.setattr(launch, "corpus", lambda folder, **sizes: write_tokens(folder / "corpus", **sizes))
    monkeypatch.setenv("KIT_WARM", "1")
    argv = ["rates", "same", "--quick", "--peers", "raw_ddp", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert rates.main() == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    rows = json.loads((tmp_path / "peers.json").read_text())["figures"]
    (goal,) = [row for row in rows if row["goal"] is not None]
    assert (goal["side"], goal["peer"]) == ("mlpipe", "raw DDP")
    ours, raw = goal["validation_losses"]["mlpipe"], goal["validation_losses"]["raw DDP"]
    assert ours == pytest.approx(raw, abs=0.005)
    assert ours[1] < ours[0]


@pytest.mark.parametrize(
    ("theirs", "count", "part", "fails"),
    [
        (8.0, 50, "same", False),
        (8.01, 50, "same", True),
        (8.0, 51, "same", True),
        (8.01, 50, "newcomer", False),
    ],
)
def test_sides_that_learn_other_targets_are_not_compared(theirs, count, part, fails):
    losses, counts = {results.OURS: [8.0], chats.PEER: [theirs]}, {results.OURS: 50, chats.PEER: count}
    if fails:
        with pytest.raises(RuntimeError, match="the sides do not compute the same"):
            chats.check(part, losses, counts)
    else:
        chats.check(part, losses, counts)
