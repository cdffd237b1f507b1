"""The command line over real training: interrupted, resumed under another strategy, promoted, exported."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import processes
from kit.command_runs import Cli, until
from kit.plans import write_tokens

pytestmark = pytest.mark.torch


@pytest.fixture
def cli(tmp_path: Path) -> Iterator[Cli]:
    write_tokens(tmp_path / "tokens")
    model = {
        "preset": "llama-1m", "seq_len": 32, "max_seq_len": 64,
        "dim": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 176,
    }  # fmt: skip
    train: dict[str, Any] = {
        "model": model,
        "data": {"tokens": str(tmp_path / "tokens"), "batch_size": 8},
        "optimizer": {"lr": 1e-3, "schedule": "constant"},
        "steps": 100,
        "strategy": "fsdp",
        "checkpoint": {"every": "50 steps", "keep": 2},
    }
    spec = {
        "version": 1,
        "name": "tiny",
        "stages": [
            {"name": "train", "train": train, "resources": {"workers_per_node": 2}},
            {
                "name": "evaluate",
                "needs": ["train"],
                "evaluate": {"gate": "val_loss < 5.5", "max_tokens": 2048, "generate_tokens": 0},
            },
            {"name": "promote", "needs": ["evaluate"], "promote": {"as": "tiny", "alias": "candidate"}},
        ],
    }
    (tmp_path / "pipeline.yaml").write_text(json.dumps(spec))
    made = Cli(tmp_path, warm=True)
    yield made
    processes.kill(made.processes())  # the long trainings of a test that failed


def records(cli: Cli, attempt: int, kind: str) -> list[dict[str, Any]]:
    path = cli.store / f"runs/r/stages/train/attempt-{attempt}/records/rank-0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for line in lines if (record := json.loads(line))["kind"] == kind]


def test_ctrl_c_saves_resume_switches_strategy_and_the_model_is_promoted_and_exported(cli: Cli):
    running = cli.start("run", "pipeline.yaml", "--run-id", "r", "--set", "train.steps=100000")
    until(lambda: len(records(cli, 1, "step")) > 20, "the training to be on its way", 600)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=600)
    assert running.returncode == 130, err
    stopped = cli.json("status", "r")
    train = stopped["stages"]["train"]
    assert (stopped["state"], train["state"]) == ("cancelled", "cancelled")
    saved = train["last_checkpoint"]["step"]
    assert saved == train["progress"]["step"] >= 20  # at the very step at which it stopped
    steps = saved + 40
    other = (
        f"train.steps={steps}",
        "stages.train.train.strategy=single",
        "stages.train.resources.workers_per_node=1",
    )
    document = cli.json("resume", "r", *(word for change in other for word in ("--set", change)))
    assert document["state"] == "done"
    (start,) = records(cli, 2, "start")
    assert (start["start_step"], start["strategy"], start["world_size"]) == (saved, "single", 1)
    before, after = records(cli, 1, "step"), records(cli, 2, "step")
    assert [record["step"] for record in after] == list(range(saved + 1, steps + 1))
    assert abs(after[0]["loss"] - before[-1]["loss"]) < 0.5 < before[0]["loss"] - after[-1]["loss"]

    status = cli("status", "r").stdout
    assert f"step {steps}/{steps}" in status
    assert Path(document["report"]).read_text().startswith("<!")
    evaluation = document["stages"]["evaluate"]["outcome"]
    assert evaluation["passed"] is True
    shown = cli.json("models", "show", "tiny", "candidate")
    assert shown["lineage"]["run"] == "r"
    assert shown["lineage"]["metrics"]["val_loss"] == evaluation["metrics"]["val_loss"]
    assert shown["step"] == steps
    assert cli.json("checkpoints", "verify", "r")["sound"]
    cli("checkpoints", "prune", "r", "--keep", "1")
    (kept,) = cli.json("checkpoints", "list", "r")["checkpoints"]
    assert kept["step"] == steps
    exported = cli.json("checkpoints", "export", "r", "--out", "model")
    assert "model.safetensors" in exported["files"]
    assert (cli.folder / "model" / "config.json").exists()
    assert cli.json("models", "promote", "r", "--as", "by-hand")["version"] == 1


def test_a_detached_training_is_cancelled_and_its_failed_gate_names_commands_that_work(cli: Cli):
    """Then the longer training's last checkpoint is damaged: discarded, it is trained again."""
    small = ("--set", "stages.train.train.strategy=zero1")  # whose ranks start with half the work of fsdp's
    few = ("--set", "stages.train.train.steps=60", "--set", "stages.evaluate.evaluate.gate=val_loss < 0.001")
    cli(
        "submit",
        "pipeline.yaml",
        "--run-id",
        "r",
        "--set",
        "stages.train.train.steps=100000",
        *few[2:],
        *small,
    )
    until(lambda: len(records(cli, 1, "step")) > 5, "the training to be on its way", 600)
    text = cli("cancel", "r").stdout
    assert "train is saved at step" in text
    assert cli.json("status", "r")["state"] == "cancelled"
    document = cli.json("resume", "r", *few, code=3)
    assert document["stages"]["evaluate"]["state"] == "failed"
    assert "val_loss" in document["stages"]["evaluate"]["message"]
    assert document["stages"]["promote"]["state"] == "skipped"
    assert cli.json("models", "list")["models"] == []

    message = document["stages"]["evaluate"]["message"]
    longer, less = re.findall(r"(?:train longer|or ask for less): mlpipe (.*)", message)
    before, last = document["stages"]["evaluate"]["outcome"]["step"], int(longer.rpartition("steps=")[2])
    assert last > before >= 60
    cli(*shlex.split(longer), code=3)
    (start,) = records(cli, 3, "start")
    assert (start["start_step"], start["steps"]) == (before, last)
    (*_, earlier, newest) = cli.json("checkpoints", "list", "r")["checkpoints"]
    assert newest["step"] == last
    blob = cli.store / newest["key"] / "model-00001"
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    assert "block 0 is corrupt" in cli("models", "promote", "r", "--as", "by-hand", code=4).stderr
    damaged = cli.json(*shlex.split(less), code=4)["stages"]["evaluate"]["message"]
    assert f"the checkpoint of step {last} is damaged: {newest['key']}/model-00001: block 0 is" in damaged
    (discard,) = re.findall(r"mlpipe (checkpoints discard .*),", damaged)
    cli(*discard.split())
    assert not blob.parent.exists()
    document = cli.json("resume", "r")
    assert (document["state"], document["stages"]["evaluate"]["outcome"]["step"]) == ("done", last)
    (start,) = records(cli, 4, "start")
    assert start["resumed_from"] == earlier["key"]

    refused = cli("resume", "r", "--set", "train.seed=5", "--set", f"train.steps={last + 9}", code=2).stderr
    assert "train.seed: 0 there, 5 now (--set train.seed=5)" in refused
    assert "no stage 'nonsense'" in cli("resume", "r", "--set", "nonsense.key=3", code=2).stderr
    assert "changes nothing" in cli("resume", "r", "--set", "train.strategy=ddp", code=2).stderr
    assert cli.json("status", "r")["state"] == "done"


def test_training_goes_on_after_its_driver_was_killed(cli: Cli):
    """Whose launcher is a new program, which the kernel tells."""
    del cli.env["KIT_WARM"]
    other = ("strategy=zero1", "steps=100000", "checkpoint.every=100000 steps")
    changes = (word for change in other for word in ("--set", f"stages.train.train.{change}"))
    running = cli.start("run", "pipeline.yaml", "--run-id", "r", *changes)
    until(lambda: len(records(cli, 1, "step")) > 5, "the training to be on its way", 600)
    running.kill()
    running.communicate()
    cli.env["KIT_WARM"] = "1"
    (saved,) = until(lambda: cli.json("checkpoints", "list", "r")["checkpoints"], "the orphan's save")
    assert saved["step"] > 5
    document = cli.json("resume", "r", "--set", f"stages.train.train.steps={saved['step'] + 60}")
    assert document["state"] == "done"
    (start,) = records(cli, 2, "start")
    assert start["start_step"] == saved["step"]


def test_modules_beside_the_pipeline_that_are_called_as_pythons_own_stand_before_none(tmp_path: Path):
    """`python -m` puts the working folder ahead: the launcher could not even begin. Others are found there,
    ahead of what is installed."""
    shadows = ("types", "random", "json", "socket")
    for name in shadows:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('this is no {name}')")
    (tmp_path / "click.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(512, 8), nn.Linear(8, 512))\n"
    )
    write_tokens(tmp_path / "tokens")
    train = {
        "model": {"entry": "click:build", "seq_len": 32},
        "data": {"tokens": "tokens", "batch_size": 4},
        "optimizer": {"lr": 1e-3},
        "steps": 2,
    }
    stage = {"name": "train", "train": train, "resources": {"workers_per_node": 1}}
    (tmp_path / "p.yaml").write_text(json.dumps({"version": 1, "name": "p", "stages": [stage]}))
    command = [str(Path(sys.executable).with_name("mlpipe")), "run", "p.yaml", "--run-id", "r"]
    env = Cli(tmp_path).env
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
