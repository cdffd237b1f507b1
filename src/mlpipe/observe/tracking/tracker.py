"""What a tracker is, and what of a record it is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlpipe._core.records import Evaluation, Record, Save, Start, Step, Validation
from mlpipe._core.retry import AwayError

__all__ = ["AwayError", "TrackedRun", "Tracker", "scalars"]


@dataclass(frozen=True)
class TrackedRun:
    """Which training it is. `config`: the pipeline file as it was asked for; `plan`: the text of plan.json;
    `decided`: what it says of the training, by key."""

    run_id: str
    pipeline: str
    stage: str
    stage_key: str
    store_url: str
    attempt: int
    config: str
    plan: str
    decided: dict[str, Any]

    @property
    def params(self) -> dict[str, str]:
        """What was decided, by dotted key; what says nothing is left out."""
        return dict(_flat(self.decided))


class Tracker(Protocol):
    """Called by one thread. Every method may raise AwayError (called again then, with the same), or
    MlpipeError: this tracker is given up."""

    name: str
    where: str
    """For messages."""
    url: str | None
    """Of its page of the run, once it has begun."""

    def begin(self, start: Start) -> int:
        """Finds the training there, or makes it. Returns the step up to which it knows all."""

    def log(self, records: Sequence[Record]) -> None:
        """The next ones, in the order written."""

    def end(self, outcome: str) -> None:
        """`done`, `saved` or `failed`. Nothing follows. Also told after a refusal, if it had begun."""


def scalars(record: Record) -> dict[str, float]:
    """Numbers of a record, by the name that trackers show."""
    values: dict[str, float | None] = {}
    match record:
        case Step():
            values = {
                "train/loss": record.loss,
                "train/grad_norm": record.grad_norm,
                "train/lr": record.lr,
                "train/tokens_per_second": record.tokens_per_second,
                "train/mfu": record.mfu_ratio,
                "train/memory_bytes": record.memory_bytes,
                "train/step_seconds": record.seconds,
                "train/data_seconds": record.data_seconds,
            }
        case Save(error=None):
            values = {
                "checkpoint/seconds": record.save_seconds,
                "checkpoint/stall_seconds": record.stall_seconds,
            }
        case Validation():
            values = {f"validation/{name}": value for name, value in (record.metrics or {}).items()}
        case Evaluation():
            values = {
                "evaluation/loss": record.val_loss,
                "evaluation/perplexity": record.val_perplexity,
                "evaluation/bits_per_byte": record.val_bits_per_byte,
                **{f"evaluation/{name}": value for name, value in (record.metrics or {}).items()},
            }
    return {name: float(value) for name, value in values.items() if value is not None}


def _flat(value: Any, at: str = "") -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key in value for pair in _flat(value[key], f"{at}.{key}" if at else str(key))]
    if value is None or value in ([], {}):
        return []
    return [(at, value if isinstance(value, str) else json.dumps(value))]
