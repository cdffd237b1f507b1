"""Metrics of a model on held-out samples by name, and the gate of an evaluation: `<metric> <op> <number>`,
such as `val_bits_per_byte < 2.6`, of one of METRICS, which every evaluation has, or of those that the stage
asks for.

Those that mlpipe has itself stand in BUILT_IN, for the pipeline file, the plan and the trainer alike
(`train/metrics.py` computes them); any other is the user's own, by `entry`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Mode = Literal["min", "max"]  # which of two values is the better one
NAME_PATTERN = r"[A-Za-z_][A-Za-z0-9_.@/-]{0,99}"

# Of held-out samples; whether less of it is better.
BUILT_IN: dict[str, Mode] = {"loss": "min", "perplexity": "min", "bits_per_byte": "min", "accuracy": "max"}

METRICS = ("val_loss", "val_perplexity", "val_bits_per_byte")
GATE_PATTERN = rf"\s*({NAME_PATTERN})\s*(<=|>=|<|>)\s*(-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]{{1,2}})?)\s*"


class Gate(NamedTuple):
    """A metric, an op of <, <=, >, >=, and the limit that it is held against."""

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
            f"with a metric such as {', '.join(METRICS)} and an op of <, <=, >, >="
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


def default_name(entry: str) -> str:
    """Of a metric of one's own: `my_pkg.metrics:TopFive` is called `top_five`."""
    name = entry.rpartition(":")[2]
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def is_of(value: str, name: str) -> bool:
    """Whether `value` is what the metric `name` gives: one number, or `NAME.KEY` of a mapping."""
    return value == name or value.startswith(f"{name}.")


def is_better(value: float, than: float | None, mode: Mode, by: float = 0.0) -> bool:
    """By more than `by`. None: there is nothing yet. What is not finite never is."""
    if not math.isfinite(value):
        return False
    if than is None:
        return True
    return value < than - by if mode == "min" else value > than + by
