"""The records of a run's stages as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlpipe._core.records import Record
from mlpipe.api.table import Table
from mlpipe.observe.records import Timeline, list_attempts, merge, read_records
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_OF_STEP = ("time", "loss", "lr", "grad_norm", "tokens_per_second", "mfu_ratio", "seconds")


def metrics(store: Store, run: RunState, stages: Iterable[str]) -> Table:
    """See `Run.metrics`."""
    table = Table()
    for stage in stages:
        if run.stages[stage].attempt == 0:
            continue
        timeline = lead(store, run, stage)
        rows: dict[int, dict[str, Any]] = {}
        for step in timeline.steps:
            row = rows[step.step] = {"stage": stage, "step": step.step}
            row |= {name: value for name in _OF_STEP if (value := getattr(step, name)) is not None}
        for found in validations(timeline):
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
    return next((one.step for one in reversed(validations(lead(store, run, stage))) if one.best), None)


def lead(store: Store, run: RunState, stage: str) -> Timeline:
    """Of rank 0, over all attempts."""
    key = f"runs/{run.run_id}/stages/{stage}"
    return merge({n: read_records(store, f"{key}/attempt-{n}", 0) for n in list_attempts(store, key)})


def validations(timeline: Timeline) -> list[Any]:
    """In the order in which they were made."""
    found: list[Record] = [record for _, record in timeline.others if record.kind == "validation"]
    return [one for one in found if getattr(one, "metrics", None) and getattr(one, "step", None) is not None]


def column(name: str) -> str:
    """Of a metric that an evaluation or a validation found."""
    return name if name.startswith(("val_", "num_")) else f"val_{name}"
