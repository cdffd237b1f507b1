"""The page of a sweep: what was varied and what came of it as parallel coordinates, the curves of the trials,
and a table of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlpipe import __version__
from mlpipe._core.errors import StoreError
from mlpipe._core.units import format_seconds
from mlpipe.observe.axes import Point
from mlpipe.observe.blocks import (
    MOST_ROWS,
    Badge,
    Card,
    Cell,
    Chart,
    Charts,
    Code,
    Piece,
    Table,
    Tiles,
    Timestamp,
    timestamp,
    utc,
)
from mlpipe.observe.measured import LOSS, curve_of, timeline
from mlpipe.observe.parallel import Coordinate, ParallelPlot, parallel_plot
from mlpipe.observe.plots import Series, line_plot
from mlpipe.observe.report import render_page, write_page
from mlpipe.observe.sweep_table import TrialRow, format_value, names_of, trial_rows
from mlpipe.store import runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_MOST_CURVES = 30  # of the best trials
_BEST, _GOOD, _OTHER, _FAILED = "blue", "teal", "grey", "red"


@dataclass(frozen=True)
class Page:
    """What the template is given."""

    sweep_id: str
    pipeline: str
    backend: str
    state: Badge
    created: Timestamp | None
    took: str
    message: str
    metric: str
    overview: list[Piece]
    parallel: ParallelPlot
    legend: Sequence[tuple[str, str]]
    curves: list[Piece]
    table: Piece
    written: str
    version: str = __version__


def write_report(store: Store, sweep: RunState, out: Path | None = None) -> str:
    """As `report.write_page`."""
    return write_page(store, sweep.run_id, build_report(store, sweep), out)


def build_report(store: Store, sweep: RunState) -> str:
    """The page; every text in it is escaped."""
    return render_page("sweep.html.jinja", _page(store, sweep))


def _page(store: Store, sweep: RunState) -> Page:
    rows, metric = trial_rows(store, sweep), str(sweep.meta.get("metric", {}).get("name", ""))
    named, colours = names_of(sweep), _colours(rows)
    coordinates = [Coordinate(name, [row.values.get(key) for row in rows]) for key, name in named.items()]
    coordinates.append(Coordinate(metric, [row.value for row in rows]))
    ended = sweep.state in runs.RUN_ENDED
    seconds = (sweep.updated if ended else time.time()) - sweep.created
    return Page(
        sweep_id=sweep.run_id,
        pipeline=sweep.pipeline,
        backend=sweep.backend,
        state=Badge(sweep.state),
        created=timestamp(sweep.created),
        took=("took " if ended else "running for ") + format_seconds(max(seconds, 0.0)),
        message=sweep.message,
        metric=metric,
        overview=[_tiles(sweep, rows, metric)],
        parallel=parallel_plot(
            coordinates,
            [(colour, _words(row, named, metric)) for row, colour in zip(rows, colours, strict=True)],
        ),
        legend=_legend(colours),
        curves=_curves(store, rows, colours, metric),
        table=_table(rows, named, metric),
        written=utc(time.time()) or "",
    )


def _colours(rows: Sequence[TrialRow]) -> list[str]:
    """Of the best, of the next third, of the rest, of those without a value."""
    num_known = sum(row.value is not None for row in rows)
    return [
        _BEST if row.is_best else _FAILED if row.value is None else _GOOD if place < num_known / 3 else _OTHER
        for place, row in enumerate(rows)
    ]


def _legend(colours: Sequence[str]) -> list[tuple[str, str]]:
    meanings = {_BEST: "the best", _GOOD: "the best third", _OTHER: "the others", _FAILED: "without a value"}
    return [(colour, words) for colour, words in meanings.items() if colour in colours]


def _tiles(sweep: RunState, rows: Sequence[TrialRow], metric: str) -> Piece:
    shown: dict[str, Cell] = {}
    best = next((row for row in rows if row.is_best), None)
    if best is not None and best.value is not None:
        shown[f"best {metric}"] = format_value(best.value)
        shown["best trial"] = best.trial
    for state in ("done", "stopped", "running", "pending", "cancelled", "skipped", "failed"):
        number = sum(row.shown_state == state for row in rows)
        shown[state] = number or None
    if promoted := sweep.meta.get("promoted"):
        shown["promoted as"] = f"{promoted['model']} {promoted['version']}"
    return Tiles(shown)


def _words(row: TrialRow, named: dict[str, str], metric: str) -> str:
    lines = [f"trial {row.trial}, {row.shown_state}"]
    lines += [f"{named[key]}: {format_value(value)}" for key, value in row.values.items()]
    lines += [f"{metric}: {format_value(row.value)}"] if row.value is not None else []
    return "\n".join(lines)


def _curves(store: Store, rows: Sequence[TrialRow], colours: Sequence[str], metric: str) -> list[Piece]:
    """The metric over steps where trainings record it, else their loss; the best one over all others."""
    shown = list(zip(rows, colours, strict=True))[:_MOST_CURVES]
    for name in dict.fromkeys((metric, LOSS)):
        curves = [(row, colour, _curve(store, row, name)) for row, colour in shown if row.state.attempt]
        curves = [one for one in curves if one[2]]
        if not curves:
            continue
        steps = sorted({step for _, _, curve in curves for step in curve})
        series = []
        for row, colour, curve in reversed(curves):
            points: list[Point] = [(step, curve.get(step)) for step in steps]
            series.append(Series(f"trial {row.trial}", colour, points))
        title = "Training loss, mean of the last 20 steps" if name == LOSS else name
        return [Charts([Chart(title, "", line_plot(series, [], unit=""))], [])]
    return []


def _curve(store: Store, row: TrialRow, metric: str) -> dict[int, float]:
    """Of the first stage that has one."""
    try:
        run = runs.read_run(store, row.run_id)
    except StoreError:  # it has none yet
        return {}
    for stage in run.stages:
        if curve := curve_of(timeline(store, row.run_id, stage), metric):
            return dict(curve)
    return {}


def _table(rows: Sequence[TrialRow], named: dict[str, str], metric: str) -> Piece:
    head = ["Trial", *named.values(), metric, "State", "Took", "Run", ""]
    body: list[list[Cell]] = []
    for row in rows:
        state = row.state
        took = None if state.started is None or state.ended is None else state.ended - state.started
        body.append(
            [
                row.trial,
                *(format_value(row.values[key]) if key in row.values else None for key in named),
                None if row.value is None else format_value(row.value),
                Badge(row.shown_state),
                None if took is None else format_seconds(max(took, 0.0)),
                Code(row.run_id),
                state.message,
            ]
        )
    numbers = frozenset({len(named) + 1, len(named) + 3})
    return Card([Table(head, body[:MOST_ROWS], numbers)])
