"""What the planner expected of a training, beside what was measured."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from mlpipe._core.units import format_bytes, format_step_seconds
from mlpipe.observe.blocks import Cell, Details, Piece, Table
from mlpipe.observe.runview import StageView, view_run
from mlpipe.plan.allocators import beside_bytes
from mlpipe.plan.calibration import Compared
from mlpipe.plan.choose import Candidate
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store

_MOST_WARMUP = 10  # steps: compiling, caches, an allocator that grows


def measured(stage: StageView) -> tuple[float, float] | None:
    """Bytes at the peak of the fullest rank, and seconds of a step: the median after the warm-up, which is a
    tenth of the steps and ten at most. None before there are three steps."""
    steps = stage.lead.steps
    kept = steps[min(_MOST_WARMUP, max(1, len(steps) // 10)) :]
    seconds = [step.seconds for step in kept if step.seconds]
    last = [step for timeline in stage.timelines.values() for step in timeline.steps[-1:]]
    peaks = [step.memory_bytes for step in last if step.memory_bytes]
    if len(seconds) < 2 or not peaks:
        return None
    return float(max(peaks)), median(seconds)


def waited_ratio(stage: StageView) -> float:
    """Share of the ranks' time in collectives, with that in which bytes are on the way."""
    steps = [step for timeline in stage.timelines.values() for step in timeline.steps]
    seconds = sum(step.seconds or 0.0 for step in steps)
    return sum(step.collective_seconds or 0.0 for step in steps) / seconds if seconds else 0.0


def predicted_usd(stage: StageView) -> float | None:
    """What the steps that are done should have cost, on the ranks and at the price of the last plan; None
    without a prediction or a price, and of an elastic training, whose ranks come and go."""
    plan, training = stage.plan, stage.training
    if plan is None or training is None or training.predicted is None or not stage.lead.steps:
        return None
    if plan.price_usd_per_device_hour is None or plan.launch.replicas is not None:
        return None
    num_steps = stage.lead.steps[-1].step
    rank_seconds = num_steps * training.predicted.step_seconds * training.mesh.world_size
    return rank_seconds / 3600 * plan.price_usd_per_device_hour


def comparison(stage: StageView) -> Piece | None:
    """None without a prediction (a model of one's own) or steps."""
    plan = stage.training
    real = measured(stage)
    if plan is None or plan.predicted is None or real is None:
        return None
    memory, seconds = real
    device = stage.plan.launch.device if stage.plan is not None else "cuda"
    expected = plan.predicted.memory_bytes - beside_bytes(device, plan.mesh.world_size)
    rows: list[list[Cell]] = [
        [
            f"peak memory of a worker, {'with library pages' if device == 'cpu' else 'of its allocator'}",
            format_bytes(expected),
            format_bytes(memory),
            _error(expected, memory),
        ],
    ]
    if stage.plan is None or stage.plan.launch.replicas is None:  # else it is of one that has the whole batch
        rows.append(
            [
                "seconds a step",
                format_step_seconds(plan.predicted.step_seconds),
                format_step_seconds(seconds),
                _error(plan.predicted.step_seconds, seconds),
            ]
        )
    if (idle := plan.predicted.idle_ratios.get(plan.communication)) is not None:
        waits = waited_ratio(stage)
        rows.append(
            [
                f"share of a step for which workers wait ({plan.communication})",
                f"{100 * idle:.1f} %",
                f"{100 * waits:.1f} %",
                f"{100 * (idle - waits):+.1f} points",
            ]
        )
    told, spent = predicted_usd(stage), stage.ledger.cost_usd if stage.ledger is not None else None
    if told is not None and spent:  # the plan knows steps; what was paid has starts, saves and lost work too
        num = stage.lead.steps[-1].step
        rows.append([f"cost of {num} steps, all told", _usd(told), _usd(spent), _error(told, spent)])
    table = Table(("", "Predicted", "Measured", "Predicted is"), rows, frozenset({1, 2, 3}))
    return Details("Predicted beside measured", [table])


def _usd(amount: float) -> str:
    return f"{amount:.4g} USD"


def _error(predicted: float, real: float) -> str:
    return f"{100 * (predicted / real - 1):+.0f} %"


def compared(store: Store, run_id: str, predict: Callable[[Plan], Candidate]) -> list[Compared]:
    """The run's finished training stages that had a prediction, beside what `predict` says of them now: they
    may have been planned by other figures than those that are to be corrected. Not of elastic ones: they are
    planned as one replica, and ran as several. Raises StoreError."""
    rows = []
    for stage in view_run(store, run_id).stages:
        plan, training, real = stage.plan, stage.training, measured(stage)
        if plan is None or training is None or training.predicted is None:
            continue
        if real is None or stage.state.state != "done" or plan.launch.replicas is not None:
            continue
        told = predict(plan)
        assert told.memory is not None
        expected = told.memory.total - beside_bytes(plan.launch.device, training.mesh.world_size)
        rows.append(Compared(run_id, stage.name, expected, real[0], told.step_seconds, real[1]))
    return rows
