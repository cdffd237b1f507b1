"""A sweep at the command line over real training: stopped, killed, resumed, with a trial that fails, and each
trial the run that it would be alone."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from kit.command_runs import Cli, until

pytestmark = pytest.mark.torch

MODULE = """
import pathlib
import time

import torch
from torch import nn


class Points:
    def __init__(self, size):
        self.x = torch.randn(size, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"inputs": self.x[i], "targets": (self.x[i].sum() > 0).long()}


class Net(nn.Module):
    def __init__(self, width, fails):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, width), nn.Linear(width, 2)])
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ValueError("no such luck")
        if not pathlib.Path("go").exists():
            time.sleep(0.5)
        return self.layers[1](torch.tanh(self.layers[0](x)))


def net(width=8, fails=False):
    return Net(width, fails)


def points(split):
    return Points(32)
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "mine.py").write_text(MODULE)
    train: dict[str, Any] = {
        "model": {"entry": "mine:net", "args": {}},
        "data": {"entry": "mine:points", "batch_size": 8},
        "optimizer": {"lr": 0.01, "schedule": "constant"},
        "steps": 60,
        "strategy": "single",
        "deterministic": True,
        "checkpoint": {"every": "1 h"},
    }
    spec = {
        "version": 1,
        "name": "swept",
        "stages": [{"name": "train", "train": train, "resources": {"workers_per_node": 1, "cpus": 1}}],
        "sweep": {
            "over": {"model.args": [{}, {"fails": True}, {"width": 16}]},
            "metric": {"name": "loss"},
            "promote": {"as": "swept"},
        },
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    return Cli(tmp_path, warm=True)


def losses(cli: Cli, run_id: str) -> list[float]:
    folder = cli.store / f"runs/{run_id}/stages/train"
    lines = [
        line
        for path in sorted(folder.glob("attempt-*/records/rank-0.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return [record["loss"] for line in lines if (record := json.loads(line))["kind"] == "step"]


def trial(cli: Cli, name: str) -> dict[str, Any]:
    path = cli.store / f"runs/s-{name}/run.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def test_a_sweep_is_stopped_and_killed_and_goes_on_and_each_trial_is_the_run_that_it_is_alone(cli: Cli):
    running = cli.start("sweep", "pipeline.yaml", "--sweep-id", "s")
    until(lambda: losses(cli, "s-000"), "the first step")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert running.returncode == 130, err
    assert "3 trials (grid over args), 1 at a time" in err
    assert "go on with: mlpipe sweep --resume s" in out
    assert trial(cli, "000")["state"] == "cancelled"
    saved = cli.json("status", "s-000")["stages"]["train"]["last_checkpoint"]
    assert saved["step"] == len(losses(cli, "s-000")) < 60

    killed = cli.start("sweep", "--resume", "s", start_new_session=True)
    until(lambda: len(losses(cli, "s-000")) > saved["step"], "the trial to go on")
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    driver = trial(cli, "000")["driver"]
    assert driver is not None
    assert cli.json("status", "s")["state"] == "running"

    (cli.folder / "go").touch()
    done = cli.json("sweep", "--resume", "s")
    assert [one["state"] for one in done["trials"]] == ["done", "failed", "done"]
    assert "no such luck" in done["trials"][1]["message"]
    assert trial(cli, "000")["stages"]["train"]["attempt"] == 2  # the kill cost it nothing
    assert trial(cli, "001")["stages"]["train"]["attempt"] == 1
    values = [one["value"] for one in done["trials"]]
    assert done["best"] == ("000" if values[0] <= values[2] else "002")
    assert done["promoted"]["version"] == 1
    page = Path(done["report"]).read_text()
    assert all(f"s-00{number}" in page for number in range(3))
    assert "Training loss" in page

    again = cli.json("sweep", "--resume", "s")
    assert again["trials"] == done["trials"]
    assert {run["run_id"] for run in cli.json("list")["runs"]} == {"s", "s-000", "s-001", "s-002"}
    assert re.search(r"\*\s+00[02]", cli("status", "s").stdout)

    override = "train.model.args={width: 16}"
    cli("run", "pipeline.yaml", "--run-id", "alone", "--set", "sweep=null", "--set", override)
    assert losses(cli, "alone") == losses(cli, "s-002")
    assert len(losses(cli, "alone")) == 60
    alone = json.loads((cli.store / "runs/alone/run.json").read_text())
    assert alone["spec_digest"] == trial(cli, "002")["spec_digest"]
