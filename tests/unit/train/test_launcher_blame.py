"""Of a gang's nodes those that know that another one is to blame end after it, and that one at once."""

from __future__ import annotations

import subprocess

import pytest
from kit import plans

from mlpipe.train import launcher, outcome
from mlpipe.train.outcome import Outcome

pytestmark = pytest.mark.unit
RANK = "  rank      : 0 (local_rank: 0)\n  exitcode  : {} (pid: 77)\n"
LOST = Outcome("failed", kind="infrastructure", message="lost a peer: Connection closed by peer")


@pytest.mark.parametrize(
    ("torchrun", "said", "left", "waits"),
    [
        ("exit 1", RANK.format(-9), None, False),
        ("exit 1", RANK.format(-15), None, True),
        ("exit 1", RANK.format(1), LOST, True),
        ("exit 1", RANK.format(1), Outcome("failed", kind="failed", message="a bug"), False),
        ("exit 1", "RendezvousConnectionError", None, True),
        ("kill -9 $$", "", None, False),
    ],
    ids=["rank killed", "stopped by torchrun", "lost a peer", "a bug", "met nobody", "torchrun killed"],
)
def test_a_node_waits_for_the_cause_unless_it_has_it(tmp_path, monkeypatch, torchrun, said, left, waits):
    def start(argv, log):
        log.write_text(said)
        if left is not None:
            outcome.write(tmp_path, left)
        return subprocess.Popen(["sh", "-c", torchrun])

    waited = []
    monkeypatch.setattr(launcher, "_wait_until", lambda condition, seconds: waited.append(seconds))
    monkeypatch.setattr(launcher, "torchrun_argv", lambda *_: [])
    monkeypatch.setattr(launcher.signal, "signal", lambda *_: None)
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=100)
    plan = plans.train_plan(tmp_path / "store", tokens, launch={"num_nodes": 2, "nproc_per_node": 1})
    one = launcher.Launcher(plan, tmp_path / "plan.json", tmp_path)
    monkeypatch.setattr(one, "_start_torchrun", start)
    assert one.run() in (3, 4)
    assert waited == [launcher._BLAMELESS_SECONDS] * waits
