"""What a run has measured: its metrics, and one of them over the steps of its training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from mlpipe._core.records import Step
from mlpipe.observe.axes import finite
from mlpipe.observe.records import Timeline, list_attempts, merge, read_records
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

LOSS = "loss"  # of the training
_RECENT_STEPS = 20  # that the training's loss is a mean over


def metrics_of(store: Store, run: RunState) -> dict[str, float]:
    """Of all stages, of several that measure the same the last one's: the training's `loss`, and what an
    evaluation found."""
    found: dict[str, float] = {}
    for name, stage in run.stages.items():
        curve = curve_of(timeline(store, run.run_id, name), LOSS)
        if curve:
            found[LOSS] = curve[-1][1]
        metrics = (stage.outcome or {}).get("metrics")
        for metric, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, int | float) and finite(value):
                found[metric] = float(value)
    return found


def timeline(store: Store, run_id: str, stage: str) -> Timeline:
    """Of rank 0 over all attempts of the stage; empty where nothing was recorded."""
    key = f"runs/{run_id}/stages/{stage}"
    attempts = list_attempts(store, key)
    return merge({number: read_records(store, f"{key}/attempt-{number}", 0) for number in attempts})


def curve_of(lead: Timeline, metric: str) -> list[tuple[int, float]]:
    """(step, value), ascending, where the value is finite. `loss`: see `smoothed`."""
    return smoothed(lead.steps) if metric == LOSS else []


def smoothed(steps: Iterable[Step]) -> list[tuple[int, float]]:
    """At each step the mean of the loss over the last 20; none from a loss on that is not finite."""
    curve: list[tuple[int, float]] = []
    recent: list[float] = []
    for step in steps:
        if step.loss is None or not finite(step.loss):
            break
        recent = [*recent[1 - _RECENT_STEPS :], step.loss]
        curve.append((step.step, fmean(recent)))
    return curve


def value_at(curve: Sequence[tuple[int, float]], step: int) -> float | None:
    """The first one that was measured at `step` or later; None: it has not got there."""
    return next((value for at, value in curve if at >= step), None)
