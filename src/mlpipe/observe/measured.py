"""What a run has measured: its metrics, and one of them over the steps of its training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from mlpipe._core.records import Start, Step, Validation
from mlpipe.observe.axes import finite
from mlpipe.observe.records import Follower, Timeline, list_attempts, merge, read_records
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

LOSS = "loss"  # of the training
_RECENT_STEPS = 20  # that the training's loss is a mean over


def metrics_of(store: Store, run: RunState) -> dict[str, float]:
    """Of all stages, of several that measure the same the last one's: the training's `loss`, what its last
    validation found as `val_NAME`, and what an evaluation found."""
    measured: dict[str, float] = {}
    for name, stage in run.stages.items():
        lead = timeline(store, run.run_id, name)
        if curve := smoothed(lead.steps):
            measured[LOSS] = curve[-1][1]
        for record in lead.validations[-1:]:
            measured |= {f"val_{metric}": value for metric, value in _of_validation(record).items()}
        metrics = (stage.outcome or {}).get("metrics")
        for metric, value in metrics.items() if isinstance(metrics, dict) else ():
            if isinstance(value, int | float) and finite(value):
                measured[metric] = float(value)
    return measured


def timeline(store: Store, run_id: str, stage: str) -> Timeline:
    """Of rank 0 over all attempts of the stage; empty where nothing was recorded."""
    key = f"runs/{run_id}/stages/{stage}"
    attempts = list_attempts(store, key)
    return merge({number: read_records(store, f"{key}/attempt-{number}", 0) for number in attempts})


def curve_of(lead: Timeline, metric: str) -> list[tuple[int, float]]:
    """(step, value), ascending, where the value is finite: of the training's `loss` as in `smoothed`, of all
    else what validations found."""
    if metric == LOSS:
        return smoothed(lead.steps)
    values = [(one.step, value_of(_of_validation(one), metric)) for one in lead.validations]
    return [(step, value) for step, value in values if step is not None and value is not None]


def value_of(metrics: Mapping[str, float], metric: str) -> float | None:
    """What is asked for by name; what a validation calls `accuracy` is `val_accuracy` as well."""
    if metric in metrics or metric == LOSS:
        return metrics.get(metric)
    plain = metric.removeprefix("val_")
    return metrics.get(f"val_{plain}", metrics.get(plain))


def _of_validation(record: Validation) -> dict[str, float]:
    metrics = record.metrics or {}
    return {name: float(value) for name, value in metrics.items() if value is not None and finite(value)}


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


class CurveFollower:
    """One metric of a run's training, read as it grows. `points`: (step, value), ascending, of the steps that
    count: what a restart went back behind counts no more."""

    def __init__(self, store: Store, stage: str, metric: str) -> None:
        self._store, self._stage, self._metric = store, stage, metric
        self._attempt = 0
        self._tail: Follower | None = None
        self._losses: list[tuple[int, float]] = []
        self.points: list[tuple[int, float]] = []

    def poll(self, run: RunState) -> None:
        """Reads what is new. Raises StoreError."""
        while self._attempt < run.stages[self._stage].attempt:
            if self._tail is not None:
                self._read(self._tail)
            self._attempt += 1
            key = f"runs/{run.run_id}/stages/{self._stage}/attempt-{self._attempt}"
            self._tail = Follower(self._store, key)
        if self._tail is not None:
            self._read(self._tail)

    def _read(self, tail: Follower) -> None:
        for record in tail.poll():
            match record:
                case Start():
                    self._roll_back(record.start_step or 0)
                case Step() if record.loss is not None and finite(record.loss):
                    self._roll_back(record.step - 1)
                    self._losses.append((record.step, record.loss))
                    if self._metric == LOSS:
                        recent = self._losses[-_RECENT_STEPS:]
                        self.points.append((record.step, fmean(loss for _, loss in recent)))
                case Validation() if record.step is not None and self._metric != LOSS:
                    value = value_of(_of_validation(record), self._metric)
                    if value is not None:
                        self.points.append((record.step, value))

    def _roll_back(self, last_kept: int) -> None:
        for points in (self._losses, self.points):
            while points and points[-1][0] > last_kept:
                points.pop()


def value_at(curve: Sequence[tuple[int, float]], step: int) -> float | None:
    """The first one that was measured at `step` or later; None: it has not got there."""
    return next((value for at, value in curve if at >= step), None)
