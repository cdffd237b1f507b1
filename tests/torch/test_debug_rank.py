"""`mlpipe run --debug-rank`: pdb in one rank of a real training, through a pseudo terminal."""

from __future__ import annotations

import json
import os
import select
import signal
import termios
import time
from pathlib import Path

import pytest
from kit.command_runs import Cli, until

pytestmark = pytest.mark.torch

MODEL = """
import os

import torch


class Linear(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls in (1, 2) and os.environ["RANK"] == "1" and "MLPIPE_DEBUG_RANK" in os.environ:
            breakpoint()
        return self.layer(x)

    def loss(self, batch):
        logits, targets = self(batch["inputs"]), batch["targets"]
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), torch.tensor(len(targets))


class Points:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return {"inputs": torch.tensor([index / 64, 1.0]), "targets": torch.tensor(index % 3)}


def points(split):
    return Points()
"""


class Terminal:
    """What somebody at a terminal sees and types."""

    def __init__(self) -> None:
        self.master, self.slave = os.openpty()
        self.seen = ""

    def expect(self, words: str, seconds: float = 300.0) -> str:
        """What came up to and with `words`."""
        deadline = time.monotonic() + seconds
        while words not in self.seen:
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {seconds} s for {words!r} in {self.seen!r}")
            if select.select([self.master], [], [], 0.2)[0]:
                self.seen += os.read(self.master, 4096).decode()
        head, _, self.seen = self.seen.partition(words)
        return head + words

    def type(self, line: str) -> None:
        os.write(self.master, f"{line}\n".encode())


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    (tmp_path / "mine.py").write_text(MODEL)
    train = {
        "model": {"entry": "mine:Linear"},
        "data": {"entry": "mine:points", "batch_size": 32},
        "steps": 50,
        "strategy": "ddp",
        "hang_timeout": "2 s",
    }
    stages = [{"name": "train", "train": train, "resources": {"workers_per_node": 2}}]
    (tmp_path / "pipeline.yaml").write_text(json.dumps({"version": 1, "name": "mine", "stages": stages}))
    return Cli(tmp_path, warm=True)


def test_a_rank_is_debugged_at_the_terminal_and_left(cli: Cli):
    terminal = Terminal()
    smoke = ("--steps", "5", "--ranks", "2", "--tiny")
    running = cli.start(
        "run", "pipeline.yaml", "--run-id", "r", "--debug-rank", "1", *smoke, stdin=terminal.slave
    )
    try:
        shown = terminal.expect("(Pdb) ")
        assert "return self.layer(x)" in shown
        terminal.type("p 41 + self.calls")
        assert "42" in terminal.expect("(Pdb) ")
        terminal.type("p x.device")  # of a training, not of what is tried out before without any numbers
        assert "device(type='cpu')" in terminal.expect("(Pdb) ")
        terminal.type("p os.environ['RANK'], os.isatty(0), os.isatty(1), os.isatty(2)")
        assert "('1', True, True, True)" in terminal.expect("(Pdb) ")
        terminal.type("c")
        terminal.expect("(Pdb) ")  # its next call
        terminal.type("q")
        out, err = running.communicate(timeout=300)
    finally:
        running.kill()
    assert running.returncode == 3, err
    assert "left in the debugger" in out
    attempt = cli.store / "runs/r/stages/train/attempt-1"
    plan = json.loads((attempt / "plan.json").read_text())
    assert (plan["train"]["steps"], plan["train"]["hang_timeout_seconds"]) == (5, 7 * 86400)
    assert plan["train"]["global_batch"] == 4  # two samples a worker
    outcome = json.loads((attempt / "outcome.json").read_text())
    assert outcome["restarts"] == 0
    assert f"  | {cli.folder}/mine.py:" in outcome["message"]
    assert "in forward: " in outcome["message"]
    assert "/dev/" in (attempt / "logs/rank-1.log").read_text()
    assert "Pdb" not in (attempt / "logs/launcher.log").read_text()


@pytest.mark.parametrize("how", ["killed", "interrupted twice"])
def test_nothing_of_a_run_that_ended_at_the_prompt_stays_at_the_terminal(cli: Cli, how: str):
    """No rank that reads what is typed to the shell, or holds its memory for the ten minutes that it has to
    save; and the terminal echoes."""
    terminal = Terminal()
    before = termios.tcgetattr(terminal.slave)
    smoke = ("--steps", "5", "--ranks", "2", "--tiny")
    running = cli.start(
        "run", "pipeline.yaml", "--run-id", "r", "--debug-rank", "1", *smoke, stdin=terminal.slave
    )
    try:
        terminal.expect("(Pdb) ")
        assert termios.tcgetattr(terminal.slave) != before  # readline's
        if how == "interrupted twice":
            running.send_signal(signal.SIGINT)
            assert running.stderr is not None
            while "stopping: " not in running.stderr.readline():
                assert running.poll() is None
            running.send_signal(signal.SIGINT)
            assert running.wait(300) == 130
    finally:
        running.kill()
        running.communicate()
    until(lambda: not cli.processes(), "all of the run to be gone")
    assert termios.tcgetattr(terminal.slave) == before
    terminal.type("ls")
    assert os.read(terminal.slave, 4096) == b"ls\n"
    if how == "killed":
        assert "done" in cli("resume", "r").stdout


def test_a_debugger_needs_a_terminal_and_a_rank_that_there_is(cli: Cli):
    said = cli("run", "pipeline.yaml", "--debug-rank", "0", code=2).stderr
    assert "standard input is no terminal" in said
    terminal = Terminal()
    sweep = "sweep={over: {train.seed: [1, 2]}, metric: {name: loss, mode: min}}"
    for more, words in (
        (("--debug-rank", "2"), "there is no rank 2: train has 2"),
        (("--debug-rank", "0", "--set", sweep), "the pipeline has a sweep"),
    ):
        running = cli.start("run", "pipeline.yaml", *more, stdin=terminal.slave)
        _, said = running.communicate(timeout=300)
        assert running.returncode == 2, said
        assert words in said
    assert not (cli.store / "runs").exists()
