"""Which trials go on, after Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020):
asynchronous successive halving. At rungs, steps that grow by a factor `eta`, the best 1/eta of those that got
there go on. Nobody waits for others: a trial is judged once at each rung, as it arrives, against those that
came before it, and one that is not among the best is stopped (the stopping variant, as in Ray Tune and Syne
Tune; the paper's own pauses trials and promotes them later)."""

from __future__ import annotations

from collections.abc import Iterable


def rungs(min_steps: int, steps: int, eta: int) -> list[int]:
    """Steps at which trials are judged: from `min_steps` on, below the last step."""
    rung_steps = []
    while min_steps < steps:
        rung_steps.append(min_steps)
        min_steps *= eta
    return rung_steps


def goes_on(value: float, others: Iterable[float], eta: int, *, less_is_better: bool) -> bool:
    """Whether one that arrives with `value` is among the best n // eta of all n that have arrived, or their
    best; `others`: the values with which the others did. Equal ones are equally good."""
    values = list(others)
    num_better = sum(other < value if less_is_better else other > value for other in values)
    return num_better < max(1, (len(values) + 1) // eta)
