"""The page of a sweep: as it was when it was last looked at, safe, and whole when there is little to show.

`MLPIPE_UPDATE_GOLDEN=1` rewrites `sweep.html`; open it in a browser before committing it.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.synthetic_run import BEGIN, write_records

from mlpipe import __version__
from mlpipe.observe import sweep_report
from mlpipe.observe.measured import CurveFollower, curve_of, timeline, value_at
from mlpipe.observe.parallel import BOTTOM, TOP, Coordinate, parallel_plot
from mlpipe.observe.sweep_report import build_report
from mlpipe.observe.sweep_table import table, trial_rows
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import RunState, StageState, create_run, read_run, update_run

pytestmark = pytest.mark.unit
GOLDEN = Path(__file__).with_name("sweep.html")
HOSTILE = "</title><script>alert(1)</script>\"'<img src=x>&lt;"
LR, KIND = "stages.fit.train.optimizer.lr", "stages.fit.train.model.args.kind"


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "store")


def put(store: FolderStore, run_id: str, names: list[str], **meta: Any) -> None:
    create_run(store, run_id, "version: 1\n", "0" * 64, names, "local", {"pipeline": "swept", **meta})


def write_sweep(
    store: FolderStore, values: list[dict[str, Any]], ends: list[StageState], **more: Any
) -> RunState:
    """A sweep and its trials; each has 40 steps, but for those that have not begun."""
    names = [f"{number:03d}" for number in range(len(values))]
    metric = {"name": "loss", "mode": "min"}
    trials = dict(zip(names, values, strict=True))
    put(store, "s", names, trials=trials, over=list(values[0]), metric=metric, method="grid")
    for number, (name, end) in enumerate(zip(names, ends, strict=True)):
        if end.state == "pending":
            continue
        put(store, f"s-{name}", ["fit"], sweep="s")
        key = f"runs/s-{name}/stages/fit/attempt-1"
        head = {"v": 1, "kind": "step", "rank": 0, "restart": 0}
        steps = range(1, (20 if "stopped_at" in end.outcome else 40) + 1)
        write_records(
            store,
            key,
            0,
            [{**head, "time": BEGIN + step, "step": step, "loss": number + 3 / step} for step in steps],
        )
    update_run(store, "s", lambda run: replace(run, state="running"))
    changed = {"state": "done", "message": "best: 001", **more}
    return update_run(
        store,
        "s",
        lambda run: replace(run, **changed, created=BEGIN, stages=dict(zip(names, ends, strict=True))),
    )


def ended(state: Any = "done", value: float | None = None, **more: Any) -> StageState:
    outcome = {} if value is None else {"value": value, "metrics": {"loss": value}}
    return StageState(state, 1, more.pop("message", ""), BEGIN, BEGIN + 30, outcome={**outcome, **more})


def test_the_page_is_as_it_was_looked_at(store, monkeypatch):
    values = [{LR: rate, KIND: kind} for rate in (1e-4, 1e-3, 1e-2, 1e-1) for kind in ("wide", "deep")]
    ends = [
        ended(value=1.4), ended(value=0.2), ended(value=0.9), ended(value=0.5),
        ended("failed", message="the loss is not finite"), ended("cancelled", 2.0, stopped_at=20),
        ended("running"), StageState(),
    ]  # fmt: skip
    write_sweep(store, values, ends)
    sweep = replace(read_run(store, "s"), updated=BEGIN + 300)
    monkeypatch.setattr(sweep_report.time, "time", lambda: BEGIN + 400)
    page = build_report(store, sweep).replace(f"mlpipe {__version__}", "mlpipe VERSION")
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        GOLDEN.write_text(page)
    assert page == GOLDEN.read_text()


def test_a_users_text_is_text_and_nothing_is_loaded_or_run(store):
    sweep = write_sweep(
        store, [{LR: HOSTILE}, {LR: "x"}], [ended(value=1.0, message=HOSTILE), ended(value=2.0)]
    )
    page = build_report(store, replace(sweep, message=HOSTILE))
    assert HOSTILE not in page
    assert "<script" not in page
    assert "src=" not in page.replace("&lt;img src=x&gt;", "")


def test_the_best_is_one_that_ended_though_another_was_better_when_it_was_stopped(store):
    ends = [ended(value=1.0), ended("cancelled", 0.1, stopped_at=20), ended("failed", 0.2)]
    sweep = write_sweep(store, [{LR: 0.1}, {LR: 0.2}, {LR: 0.3}], ends)
    rows = trial_rows(store, sweep)
    assert [row.trial for row in rows] == ["000", "001", "002"]
    assert [row.is_best for row in rows] == [True, False, False]


def test_a_sweep_of_which_nothing_has_begun_has_a_page_and_a_table(store):
    sweep = write_sweep(
        store, [{LR: 0.1}, {LR: [1, {"a": None}]}], [StageState(), StageState()], state="running"
    )
    assert "000" in build_report(store, sweep)
    lines = table(sweep, trial_rows(store, sweep))
    assert lines[0].split() == ["TRIAL", "lr", "loss", "STATE"]
    assert lines[2].split() == ["001", "[1,", '{"a":', "null}]", "pending"]


@given(
    st.lists(
        st.one_of(
            st.none(), st.floats(-1e12, 1e12), st.integers(-(10**9), 10**9), st.text(max_size=3),
            st.lists(st.integers(), max_size=2), st.booleans(),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_every_value_has_a_place_on_its_axis_and_equal_ones_the_same(values):
    plot = parallel_plot(
        [Coordinate("a", values), Coordinate("b", [1.0] * len(values))], [("blue", "")] * len(values)
    )
    ends = [line.d for line in plot.lines[::-1]]
    for value, d in zip(values, ends, strict=True):
        assert (d == "") == (value is None)
        if value is not None:
            y = float(d.split("L")[0].split()[1])
            assert TOP <= y <= BOTTOM
            same = [other for number, other in enumerate(ends) if repr(values[number]) == repr(value)]
            assert set(same) == {d}
    assert all(TOP <= y <= BOTTOM for axis in plot.axes for y, _ in axis.ticks)


def test_more_lies_above_less_and_magnitudes_are_spread_evenly():
    plot = parallel_plot([Coordinate("lr", [1e-4, 1e-3, 1e-2])], [("blue", "")] * 3)
    heights = [float(line.d.split()[1]) for line in plot.lines[::-1]]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.2)
    assert [words for _, words in plot.axes[0].ticks] == ["0.0001", "0.001", "0.01"]


def test_a_curve_is_followed_over_attempts_as_it_is_read_at_the_end(store):
    put(store, "r", ["fit"])
    update_run(store, "r", lambda run: replace(run, state="running"))
    follower = CurveFollower(store, "fit", "loss")
    head = {"v": 1, "rank": 0, "restart": 0}
    lives = [(1, 0, 30), (2, 24, 41)]  # the second goes back behind six steps
    for attempt, start, last in lives:
        update_run(store, "r", lambda run, n=attempt: replace(run, stages={"fit": StageState("running", n)}))
        key = f"runs/r/stages/fit/attempt-{attempt}"
        write_records(store, key, 0, [{**head, "kind": "start", "time": BEGIN, "start_step": start}])
        for step in range(start + 1, last + 1):
            loss = math.sin(step) + attempt
            write_records(
                store, key, 0, [{**head, "kind": "step", "time": BEGIN, "step": step, "loss": loss}]
            )
            follower.poll(read_run(store, "r"))
    whole = curve_of(timeline(store, "r", "fit"), "loss")
    assert follower.points == [(step, pytest.approx(value)) for step, value in whole]
    assert [step for step, _ in whole] == list(range(1, 42))
    late = CurveFollower(store, "fit", "loss")  # of another controller
    late.poll(read_run(store, "r"))
    assert late.points == follower.points
    assert value_at(whole, 41) == whole[-1][1]
    assert value_at(whole, 42) is None
