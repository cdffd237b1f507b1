"""What is measured while a training runs (`TrainPlan.validate`), and what follows from it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mlpipe._core.gate import Mode


class MetricPlan(NamedTuple):
    """`name`: of `_core/gate.py`, or what the user calls one of their own, which has an `entry`: a class
    or function `package.module:name`, called with `args`."""

    name: str
    entry: str | None = None
    args: Mapping[str, Any] = {}


class BestPlan(NamedTuple):
    """The checkpoint to keep: that with the least or the largest value of `metric`."""

    metric: str
    mode: Mode


class StopPlan(NamedTuple):
    """The training ends after `patience` validations in a row none of which was better, by more than
    `min_delta`, than the best before them."""

    patience: int
    min_delta: float


class ValidatePlan(NamedTuple):
    """Validation in training: every so many steps, and after the last one. `sample`: what the text begins
    with that is generated each time; None: none is."""

    every_steps: int
    max_tokens: int
    metrics: tuple[MetricPlan, ...]
    best: BestPlan | None = None
    stop: StopPlan | None = None  # judged by the metric of `best`
    sample: str | None = None
    generate_tokens: int = 64
