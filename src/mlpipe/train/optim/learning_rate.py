"""The learning rate of each update."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

from mlpipe.plan.entry import Entry
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.train.contract import broken
from mlpipe.train.model import load_entry


def learning_rate(plan: OptimizerPlan, step: int, num_steps: int) -> float:
    """Of update number `step`, counted from 1.

    Linear warm-up to `lr`, then: constant; cosine (Loshchilov & Hutter 2017), linear or polynomial (linear
    to the power of `power`) down to `min_lr_ratio * lr` at `num_steps`; wsd (Hu et al., MiniCPM, 2024):
    constant, then linear decay over the last `decay_steps`; own: the user's factor. Raises TrainError (input)
    where that is no number of at least 0.
    """
    if step <= plan.warmup_steps:
        return plan.lr * step / plan.warmup_steps
    if plan.own_schedule is not None:
        return plan.lr * _own_factor(plan.own_schedule, step, num_steps)
    floor = plan.min_lr_ratio
    if plan.schedule == "constant":
        return plan.lr
    start = num_steps - plan.decay_steps if plan.schedule == "wsd" else plan.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, num_steps - start)))
    if plan.schedule == "cosine":
        return plan.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    if plan.schedule == "polynomial":
        return plan.lr * (floor + (1 - floor) * (1 - progress) ** (plan.power or 1.0))
    return plan.lr * (1 - (1 - floor) * progress)


def check_schedule(plan: OptimizerPlan, num_steps: int) -> None:
    """Calls a schedule of the user's once, before anything is trained. Raises TrainError (input)."""
    if plan.own_schedule is not None:
        _own_factor(plan.own_schedule, 1, num_steps)


def _own_factor(entry: Entry, step: int, num_steps: int) -> float:
    try:
        factor = _function(entry.entry)(step, num_steps, **entry.args)
    except Exception as error:
        raise broken(
            entry.entry,
            f"failed at step {step} of {num_steps}: {type(error).__name__}: {error}",
            "take the step, the number of steps, and the `args`",
        ) from error
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or not math.isfinite(factor) or factor < 0:
        raise broken(
            entry.entry,
            f"gave {factor!r} for step {step} of {num_steps}, which is no factor of a learning rate",
            "return a number of at least 0",
        )
    return float(factor)


@cache
def _function(entry: str) -> Callable[..., Any]:
    return load_entry(Entry(entry, {}))
