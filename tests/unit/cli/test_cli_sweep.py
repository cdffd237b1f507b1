"""Sweeps as real processes on this machine, whose trials are still in a stage before their training: two at a
time, each with its part of the CPUs, stopped at once by a second Ctrl-C; in the background; and refusals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kit.command_runs import Cli, until

pytestmark = pytest.mark.unit

# Says which CPUs it has, and does not listen.
STUBBORN = """grep Cpus_allowed_list /proc/self/status > new.$MLPIPE_RUN_ID
mv new.$MLPIPE_RUN_ID cpus.$MLPIPE_RUN_ID
trap '' TERM; while :; do sleep 0.1; done"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "mine.py").write_text("def net(): ...\ndef points(split): ...\n")
    train = {
        "model": {"entry": "mine:net"},
        "data": {"entry": "mine:points", "batch_size": 8},
        "steps": 10,
        "strategy": "single",
    }
    spec = {
        "version": 1,
        "name": "swept",
        "stages": [
            {"name": "first", "command": ["sh", "-c", STUBBORN]},
            {"name": "fit", "needs": ["first"], "train": train},
        ],
        "sweep": {"over": {"seed": "0..2"}, "metric": {"name": "loss"}, "max_parallel": 2},
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    return Cli(tmp_path)


def cpus(cli: Cli, run_id: str) -> str:
    path = cli.folder / f"cpus.{run_id}"
    return until(lambda: path.exists() and path.read_text().split()[1], f"{run_id} to begin")


def test_two_ctrl_c_stop_all_trials_at_once_and_each_had_its_part_of_the_machine(cli: Cli):
    running = cli.start("run", "pipeline.yaml", "--run-id", "s")
    parts = {cpus(cli, "s-000"), cpus(cli, "s-001")}
    assert len(parts) == min(2, len(os.sched_getaffinity(0)))
    for _ in range(2):
        running.send_signal(signal.SIGINT)
        until(lambda: (cli.store / "runs/s-001/cancel").exists(), "the first one to be heard")
    _, err = running.communicate(timeout=300)
    assert running.returncode == 130, err
    status = cli.json("status", "s")
    assert [trial["state"] for trial in status["trials"]] == ["cancelled", "cancelled", "pending"]
    assert "Ctrl-C again" in err


def test_in_the_background_a_sweep_goes_on_until_it_is_cancelled_by_its_id(cli: Cli):
    spec = (cli.folder / "pipeline.yaml").read_text().replace("trap '' TERM; ", "")
    (cli.folder / "pipeline.yaml").write_text(spec)
    assert cli("submit", "pipeline.yaml", "--run-id", "s").stdout == "s\n"
    cpus(cli, "s-001")
    shown = cli("status", "s").stdout
    assert "s  running" in shown
    assert "\ndriven by process " in shown
    assert "--resume" not in shown
    assert "mlpipe logs s-000" in cli("logs", "s", code=2).stderr
    refused = cli("sweep", "--resume", "s", code=2).stderr
    assert "is driven by" in refused
    document = cli.json("cancel", "s")
    assert document["state"] == "cancelled"
    assert cli.json("status", "s-001")["state"] == "cancelled"
    assert not (cli.folder / "cpus.s-002").exists()


def test_what_is_of_one_run_is_refused_of_a_sweep_and_says_what_to_write(cli: Cli):
    for words in (
        ("submit", "pipeline.yaml", "--wait"),
        ("render", "pipeline.yaml", "--for", "kubernetes"),
        ("sweep", "pipeline.yaml", "--sweep-id", "s", "--follow", "000"),
        ("sweep", "--follow", "000"),
        ("sweep", "--sweep-id", "s", "--follow", "000", "--to", "kubernetes"),
        ("sweep", "--resume", "s", "--to", "kubernetes"),
        ("sweep",),
    ):
        assert "sweep" in cli(*words, code=2).stderr
    assert "not both" in cli("sweep", "pipeline.yaml", "--resume", "s", code=2).stderr
    plain = cli("sweep", "pipeline.yaml", "--set", "sweep=null", code=2).stderr
    assert "the pipeline has no sweep" in plain
    assert not cli.store.exists()
