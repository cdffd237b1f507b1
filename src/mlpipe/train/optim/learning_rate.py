"""The learning rate of each update."""

from __future__ import annotations

import math

from mlpipe.plan.plan import OptimizerPlan


def learning_rate(plan: OptimizerPlan, step: int, num_steps: int) -> float:
    """Of update number `step`, counted from 1.

    Linear warm-up to `lr`, then: constant; cosine (Loshchilov & Hutter 2017) or linear down to
    `min_lr_ratio * lr` at `num_steps`; wsd (Hu et al., MiniCPM, 2024): constant, then linear decay over
    the last `decay_steps`.
    """
    if step <= plan.warmup_steps:
        return plan.lr * step / plan.warmup_steps
    floor = plan.min_lr_ratio
    if plan.schedule == "constant":
        return plan.lr
    start = num_steps - plan.decay_steps if plan.schedule == "wsd" else plan.warmup_steps
    progress = min(1.0, max(0.0, (step - start) / max(1, num_steps - start)))
    if plan.schedule == "cosine":
        return plan.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
    return plan.lr * (1 - (1 - floor) * progress)
