"""What somebody sets up on the first morning (a schedule, groups, an average of the weights, data workers, a
metric of her own, the best checkpoint, an early end, TensorBoard): killed and resumed, nothing differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit import plans, processes
from kit.command_runs import Cli, until
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.torch

MINE = """
import random
import time
from pathlib import Path

import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 4)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs):
        if self.training:
            self.steps.add_(1)
            while self.steps == 24 and Path("hold").exists():
                time.sleep(0.05)
        x = inputs
        for block in self.blocks:
            x = self.dropout(torch.relu(block(x)))
        return self.head(x)

class Points:
    def __init__(self, split, noise):
        self.base, self.size = (0, 200) if split == "train" else (1000, 37)
        self.noise = noise

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(self.base + index))
        return {"inputs": x + self.noise * random.random(), "targets": x[:4].argmax()}

def until_10(step, steps):
    return float(step <= 10)

class Right:
    def __init__(self):
        self.right, self.total = 0, 0

    def update(self, outputs, batch):
        self.right += int((outputs.argmax(-1) == batch["targets"]).sum())
        self.total += len(batch["targets"])

    def compute(self):
        return self.right / self.total
"""
RANKS = {"single": 1, "fsdp": 2}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "mine.py").write_text(MINE)
    return Cli(tmp_path, warm=True)


def write_pipeline(cli: Cli, strategy: str, noise: float) -> None:
    """`noise`: of dropout and of the samples; other ranks draw others."""
    train = {
        "model": {"entry": "mine:Net", "args": {"dropout": noise}},
        "data": {"entry": "mine:Points", "args": {"noise": noise}, "batch_size": 16, "workers": 2},
        "steps": 60,
        "strategy": strategy,
        "precision": "fp32",
        "optimizer": {
            "lr": 3e-2,
            "schedule": {"entry": "mine:until_10"},
            "groups": [{"match": "*.bias", "weight_decay": 0, "lr_scale": 2}],
        },
        "ema": {"decay": 0.5},
        "checkpoint": {"every": "21 steps"},
        "validate": {
            "every": "5 steps",
            "metrics": ["loss", {"entry": "mine:Right"}],
            "best": {"metric": "right", "mode": "max"},
            "stop": {"patience": 4},  # weights rest after step 10: it stops in step 25 at the earliest
        },
        "track": ["tensorboard"],
    }
    stage = {"name": "train", "train": train, "resources": {"workers_per_node": RANKS[strategy]}}
    (cli.folder / "pipeline.yaml").write_text(json.dumps({"version": 1, "name": "mine", "stages": [stage]}))


def told(cli: Cli, run: str) -> dict[str, Any]:
    """All that a training says and leaves."""
    stage, store = cli.store / f"runs/{run}/stages/train", FolderStore(cli.store)
    steps, validations = {}, {}
    for attempt in sorted(stage.glob("attempt-*/records/rank-0.jsonl")):
        for one in plans.lines(attempt.read_bytes()):
            if one["kind"] == "step":
                steps[one["step"]] = (one["loss"], one["grad_norm"], one["lr"])
            if one["kind"] == "validation":
                validations[one["step"]] = (one["metrics"]["loss"], one["metrics"]["right"], one["best"])
    board = EventAccumulator(str(stage / "tensorboard"), size_guidance={"scalars": 0})
    board.Reload()
    best = catalogue.best(store, f"runs/{run}/stages/train")
    assert best is not None
    return {
        "steps": sorted(steps.items()),
        "validations": sorted(validations.items()),
        "message": cli.json("status", run)["stages"]["train"]["message"],
        "best": (best.step, processes.digest_of(store, best.key)),
        "board": {
            name: [(one.step, one.value) for one in board.Scalars(name)]
            for name in ("train/loss", "train/lr", "validation/loss", "validation/right")
        },
    }


def killed_and_resumed(cli: Cli, run: str, *changes: str) -> None:
    """Killed at once in step 24, three after the last checkpoint, in which patience was counted already."""
    (cli.folder / "hold").touch()
    running = cli.start("run", "pipeline.yaml", "--run-id", run)
    stage = cli.store / f"runs/{run}/stages/train"
    records = stage / "attempt-1/records/rank-0.jsonl"

    def stands() -> bool:
        assert running.poll() is None, "it ended before step 24"
        last = catalogue.latest(FolderStore(cli.store), f"runs/{run}/stages/train")
        return (
            last is not None
            and last.step == 21
            and any(one["kind"] == "step" and one["step"] == 23 for one in plans.lines(records.read_bytes()))
        )

    until(stands, "step 23 and the checkpoint of step 21", 600)
    everything = cli.processes()
    processes.kill(everything)
    running.communicate(timeout=300)
    until(lambda: processes.gone(everything), "the end of all")
    (cli.folder / "hold").unlink()
    assert cli.json("resume", run, *changes)["state"] == "done"


def test_killed_and_resumed_with_another_number_of_data_workers_nothing_differs(cli: Cli):
    write_pipeline(cli, "fsdp", noise=0.1)
    cli("run", "pipeline.yaml", "--run-id", "whole")
    killed_and_resumed(cli, "cut", "--set", "train.data.workers=1")
    whole = told(cli, "whole")
    assert told(cli, "cut") == whole
    assert "stopped early at step" in whole["message"]
    last = whole["steps"][-1][0]
    assert [at for at, _ in whole["validations"]] == list(range(5, last + 1, 5))
    assert [at for at, _ in whole["board"]["train/loss"]] == list(range(1, last + 1))
    assert whole["best"][0] < 20 < last < 60


def test_killed_on_one_rank_and_resumed_on_two_it_validates_and_ends_as_on_one(cli: Cli):
    write_pipeline(cli, "single", noise=0.0)
    cli("run", "pipeline.yaml", "--run-id", "whole")
    fsdp = ("train.strategy=fsdp", "stages.train.resources.workers_per_node=2")
    killed_and_resumed(cli, "cut", *(word for change in fsdp for word in ("--set", change)))
    whole, cut = told(cli, "whole"), told(cli, "cut")
    assert (cut["message"], cut["best"][0]) == (whole["message"], whole["best"][0])
    assert len(cut["validations"]) == len(whole["validations"])
    for (at, found), (of, expected) in zip(cut["validations"], whole["validations"], strict=True):
        assert (at, found) == (of, pytest.approx(expected, rel=1e-6))
