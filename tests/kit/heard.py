"""Callbacks for the torch ring."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from kit.models import lose_patience


class Hears:
    """Writes what it hears, a line each, into `<folder>/<its rank>`; and draws numbers, which nobody shall
    notice."""

    def __init__(self, folder: str, context: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder, str(context.rank))
        self.write("made", context.run_id, context.world_size, context.plan["train"]["steps"])

    def write(self, *words: Any) -> None:
        torch.rand(3)
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\n")

    def on_start(self, start: Any) -> None:
        self.write("start", start.start_step, start.rank)

    def on_step(self, step: Any) -> None:
        self.write("step", step.step, step.loss, step.lr, step.tokens_per_second)

    def on_checkpoint(self, save: Any) -> None:
        self.write("checkpoint", save.step, save.key)

    def on_end(self, end: Any) -> None:
        self.write("end", end.outcome, end.step, end.message)


class Raises:
    def __init__(self, hook: str) -> None:
        setattr(self, hook, self.fail)

    def fail(self, record: Any) -> None:
        raise ValueError("of their own")


class Sleeps:
    def on_step(self, step: Any) -> None:
        lose_patience()
        time.sleep(600)


class Kills:
    """The process of `rank`, after `step` of the first start."""

    def __init__(self, rank: int, step: int, context: Any) -> None:
        self.step = step if (context.rank, context.restart) == (rank, 0) else None

    def on_step(self, step: Any) -> None:
        if step.step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


class Patient:
    """W&B's package is told the rest, and starts its service, however slow the machine is."""

    def __init__(self) -> None:
        from mlpipe.observe.tracking import tracking, wandb

        tracking.END_SECONDS = wandb._FINISH_SECONDS = 300.0
        os.environ |= {"WANDB__SERVICE_WAIT": "300", "WANDB_INIT_TIMEOUT": "300"}

    def on_start(self, start: Any) -> None:
        pass


class Deaf:
    pass


def broken() -> Any:
    raise OSError("not today")


class Looks:
    """How many files and threads each of what stands above a rank has, a line a start, into `file`: its fork
    server, torchrun and the launcher."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def on_start(self, start: Any) -> None:
        held, above = [], os.getppid()
        for _ in range(3):
            folder = Path("/proc", str(above))
            held += [len(os.listdir(folder / part)) for part in ("fd", "task")]
            above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        with self.file.open("a") as file:
            file.write(json.dumps(held) + "\n")
