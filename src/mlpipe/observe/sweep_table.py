"""The trials of a sweep as a table, and as plain JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlpipe._core.tables import aligned
from mlpipe._core.units import format_seconds
from mlpipe.observe.progress import Summary, format_loss, live_line
from mlpipe.observe.top import Top
from mlpipe.store import sweeps
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState, StageState


@dataclass(frozen=True)
class TrialRow:
    """`values`: by full key. `value`: of the metric. `progress`: of the training under way."""

    trial: str
    run_id: str
    values: dict[str, Any]
    state: StageState
    value: float | None
    is_best: bool
    progress: Summary | None = None

    @property
    def shown_state(self) -> str:
        """Of the table: one that did not go on at a rung was not cancelled by anybody."""
        return "stopped" if self.state.outcome.get("stopped_at") is not None else self.state.state

    def document(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "trial": self.trial,
            "run_id": self.run_id,
            "values": self.values,
            "state": self.shown_state,
            "value": self.value,
            "metrics": self.state.outcome.get("metrics", {}),
            "message": self.state.message,
            "started": self.state.started,
            "ended": self.state.ended,
            "progress": self.progress,
        }


def trial_rows(store: Store, sweep: RunState, top: Top | None = None) -> list[TrialRow]:
    """The best first. `top`: one that is kept reads only what is new of those under way."""
    top, best = top or Top(store), sweeps.best(sweep)
    rows = []
    for name in sweeps.ranked(sweep):
        state, run_id = sweep.stages[name], sweeps.trial_run_id(sweep.run_id, name)
        under_way = state.state == "running" and store.exists(f"runs/{run_id}/run.json")
        rows.append(
            TrialRow(
                name,
                run_id,
                dict(sweeps.values_of(sweep, name)),
                state,
                sweeps.value_of(state),
                name == best,
                top.run(run_id).progress if under_way else None,
            )
        )
    return rows


def table(sweep: RunState, rows: Sequence[TrialRow]) -> list[str]:
    """Lines of text, heading first; the best trial is marked."""
    named = names_of(sweep)
    metric = str(sweep.meta.get("metric", {}).get("name", ""))
    cells: list[Sequence[str]] = [["", "TRIAL", *named.values(), metric, "STATE", ""]]
    for row in rows:
        value = "" if row.value is None else format_value(row.value)
        shown = [format_value(row.values[key]) if key in row.values else "" for key in named]
        cells.append(["*" if row.is_best else "", row.trial, *shown, value, row.shown_state, _more(row)])
    return aligned(cells, left=(0, 1, len(named) + 3, len(named) + 4))


def _more(row: TrialRow) -> str:
    """How far it is, or how it ended."""
    if row.state.state == "running":
        return "" if row.progress is None else live_line(row.progress, width=60)
    took = ""
    if row.state.started is not None and row.state.ended is not None:
        took = format_seconds(max(row.state.ended - row.state.started, 0.0))
    message = row.state.message.partition("\n")[0]
    return ": ".join(filter(None, (took, message)))


def names_of(sweep: RunState) -> dict[str, str]:
    """Each key that is varied, by a short name."""
    return sweeps.short_names(sweep.meta["over"])


def said(sweep: RunState, trial: str) -> str:
    """The values of a trial in a line: `lr=0.0001 seed=2`."""
    values = sweeps.values_of(sweep, trial)
    named = names_of(sweep)
    return " ".join(f"{named[key]}={format_value(value)}" for key, value in values.items())


def format_value(value: Any) -> str:
    """A number with four significant digits, text as it is, all else as JSON."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else format_loss(value)
    return value if isinstance(value, str) else json.dumps(value)


def document(store: Store, sweep: RunState) -> dict[str, Any]:
    """The sweep for `--output json`."""
    best = sweeps.best(sweep)
    return {
        "sweep_id": sweep.run_id,
        "store": store.url,
        "state": sweep.state,
        "message": sweep.message,
        "method": sweep.meta.get("method"),
        "metric": sweep.meta.get("metric"),
        "best": best,
        "best_run_id": None if best is None else sweeps.trial_run_id(sweep.run_id, best),
        "promoted": sweep.meta.get("promoted"),
        "trials": [row.document() for row in sorted(trial_rows(store, sweep), key=lambda row: row.trial)],
    }


def headline(sweep: RunState) -> str:
    """`name-2026...  running, 3 of 8 trials ended, started 4m ago`."""
    ended = sum(trial.state not in ("pending", "running") for trial in sweep.stages.values())
    ago = format_seconds(max(time.time() - sweep.created, 0.0))
    return f"{sweep.run_id}  {sweep.state}, {ended} of {len(sweep.stages)} trials ended, started {ago} ago"
