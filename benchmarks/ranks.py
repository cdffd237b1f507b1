"""Ranks on this machine, joined by gloo, that measure something: how they are started, and how they tell what
they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from mlpipe.plan.work import TrainPlan

_LONGEST_SECONDS = 1800


def measured(module: str, num_ranks: int, asked: dict[str, Any]) -> Any:
    """What rank 0 of `module` returned, which calls `run`. Raises RuntimeError where a rank fails."""
    with tempfile.TemporaryDirectory() as name:
        Path(name, "asked.json").write_text(json.dumps(asked))
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, name],
                env={
                    **os.environ,
                    "RANK": str(rank),
                    "WORLD_SIZE": str(num_ranks),
                    "OMP_NUM_THREADS": "1",
                },
            )
            for rank in range(num_ranks)
        ]
        try:
            codes = [rank.wait(timeout=_LONGEST_SECONDS) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(Path(name, "told.json").read_text())


def train_plan(**given: Any) -> TrainPlan:
    """For the trainer's techniques and schedules alone: what else a training must be told is None."""
    needed = [name for name in TrainPlan._fields if name not in TrainPlan._field_defaults]
    return TrainPlan(**{**dict.fromkeys(needed), **given})


def run(measure: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """One rank. `measure`: of what was asked for."""
    import torch.distributed as dist  # not where ranks are started

    folder = Path(sys.argv[1])
    asked = json.loads((folder / "asked.json").read_text())
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    told = measure(asked)
    if rank == 0:
        (folder / "told.json").write_text(json.dumps(told))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort at the interpreter's end
