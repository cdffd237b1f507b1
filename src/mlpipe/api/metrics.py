"""The records of a run's stages as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlpipe._core.records import Record
from mlpipe.api.table import Table
from mlpipe.observe.measured import timeline
from mlpipe.observe.records import Timeline
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_OF_STEP = ("time", "loss", "lr", "grad_norm", "tokens_per_second", "mfu_ratio", "seconds")


def metrics(store: Store, run: RunState, stages: Iterable[str]) -> Table:
    """See `Run.metrics`."""
    table = Table()
    for stage in stages:
        if run.stages[stage].attempt == 0:
            continue
        read = timeline(store, run.run_id, stage)
        rows: dict[int, dict[str, Any]] = {}
        for step in read.steps:
            row = rows[step.step] = {"stage": stage, "step": step.step}
            row |= {name: value for name in _OF_STEP if (value := getattr(step, name)) is not None}
        for found in validations(read):
            row = rows.setdefault(found.step, {"stage": stage, "step": found.step, "time": found.time})
            row |= {column(name): value for name, value in found.metrics.items()}
        table += [rows[step] for step in sorted(rows)]
        told = (run.stages[stage].outcome or {}).get("metrics")
        if isinstance(told, dict):
            row = {"stage": stage, "step": run.stages[stage].outcome.get("step")}
            row |= {column(name): value for name, value in told.items() if value is not None}
            table.append(row)
    return table


def best_step(store: Store, run: RunState, stage: str) -> int | None:
    """Of the best checkpoint so far, as validation found it; None where nothing was validated."""
    if run.stages[stage].attempt == 0:
        return None
    found = validations(timeline(store, run.run_id, stage))
    return next((one.step for one in reversed(found) if one.best), None)


def validations(read: Timeline) -> list[Any]:
    """In the order in which they were made."""
    found: list[Record] = [record for _, record in read.others if record.kind == "validation"]
    return [one for one in found if getattr(one, "metrics", None) and getattr(one, "step", None) is not None]


def column(name: str) -> str:
    """Of a metric that an evaluation or a validation found."""
    return name if name.startswith(("val_", "num_")) else f"val_{name}"
