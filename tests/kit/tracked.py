"""Records and a run for the tests of trackers."""

from __future__ import annotations

from typing import Any

from mlpipe._core.record_lines import NOT_STARTED
from mlpipe._core.records import Save, Start, Step, Validation
from mlpipe.observe.tracking.tracker import TrackedRun

START = Start(**{**NOT_STARTED.values(), "time": 1000.0, "start_step": 0})


def resumed(at: int, restart: int = 0) -> Start:
    return Start(
        **{**START.values(), "start_step": at, "restart": restart, "resumed_from": f"checkpoints/step-{at}"}
    )


def run_of(attempt: int = 1, **changes: Any) -> TrackedRun:
    given: dict[str, Any] = {
        "run_id": "r", "pipeline": "tiny", "stage": "train", "stage_key": "runs/r/stages/train",
        "store_url": "/store", "attempt": attempt, "config": "steps: 40\n", "plan": '{"stage": "train"}\n',
        "decided": {"steps": 40, "optimizer": {"name": "adamw", "lr": 0.001, "args": {"betas": [0.9, 0.95]}}},
    }  # fmt: skip
    return TrackedRun(**{**given, **changes})


def step(number: int, loss: float = 1.0, **fields: Any) -> Step:
    given: dict[str, Any] = {
        "time": 1000.0 + number, "step": number, "loss": loss, "grad_norm": 1.0, "tokens": 64,
        "target_tokens": 64, "seconds": 0.5, "data_seconds": 0.0, "compute_seconds": 0.5,
        "collective_seconds": 0.0, "memory_bytes": 1,
    }  # fmt: skip
    return Step(**{**given, **fields})


def save(number: int, error: str | None = None) -> Save:
    key = f"checkpoints/step-{number}"
    return Save(
        time=1000.5 + number, step=number, key=key, bytes=9, stall_seconds=0.5, save_seconds=2.0, error=error
    )


def validation(number: int, **metrics: float) -> Validation:
    return Validation(
        time=1000.7 + number, step=number, metrics=metrics or {"loss": 3.5}, num_samples=4, best=True,
        seconds=0.1, sample="def main",
    )  # fmt: skip
