"""The gate of an evaluation: `<metric> <op> <number>`, such as `val_bits_per_byte < 2.6`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

METRICS = ("val_loss", "val_perplexity", "val_bits_per_byte")
GATE_PATTERN = rf"\s*({'|'.join(METRICS)})\s*(<=|>=|<|>)\s*([0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,2}})?)\s*"


@dataclass(frozen=True)
class Gate:
    """A metric of METRICS, an op of <, <=, >, >=, and the limit that it is held against."""

    metric: str
    op: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric} {self.op} {self.limit:g}"


def parse_gate(text: str) -> Gate:
    """Raises ValueError that says what to write instead."""
    match = re.fullmatch(GATE_PATTERN, text)
    if match is None:
        raise ValueError(
            f"{text!r} is not a gate; write '<metric> <op> <number>' like 'val_bits_per_byte < 2.6', "
            f"with a metric of {', '.join(METRICS)} and an op of <, <=, >, >="
        )
    metric, op, limit = match.groups()
    return Gate(metric, op, float(limit))


def check(gate: Gate, metrics: Mapping[str, float]) -> bool:
    """Whether the gate holds; never for a value that is not finite. Raises KeyError for a missing metric."""
    value = metrics[gate.metric]
    if not math.isfinite(value):
        return False
    return {
        "<": value < gate.limit,
        "<=": value <= gate.limit,
        ">": value > gate.limit,
        ">=": value >= gate.limit,
    }[gate.op]
