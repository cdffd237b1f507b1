"""The records of a run's stages as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlpipe.api.table import Table
from mlpipe.observe.measured import timeline
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
        for validation in read.validations:
            if validation.step is not None and validation.metrics:
                row = rows.setdefault(
                    validation.step, {"stage": stage, "step": validation.step, "time": validation.time}
                )
                row |= {column(name): value for name, value in validation.metrics.items()}
        table += [rows[step] for step in sorted(rows)]
        told = (run.stages[stage].outcome or {}).get("metrics")
        if isinstance(told, dict):
            row = {"stage": stage, "step": run.stages[stage].outcome.get("step")}
            row |= {column(name): value for name, value in told.items() if value is not None}
            table.append(row)
    return table


def column(name: str) -> str:
    """Of a metric that an evaluation or a validation found."""
    return name if name.startswith(("val_", "num_")) else f"val_{name}"
