"""`mlpipe forecast` on stores that the test writes."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from kit import synthetic_run

from mlpipe._core.records import Launched, Submitted
from mlpipe.api.demand import demand
from mlpipe.cli.app import app
from mlpipe.cli.session import CliSession
from mlpipe.observe.demand import DAY_SECONDS, Use
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.store.runs import StageState

pytestmark = pytest.mark.unit
TODAY = 20_780  # 2026-11-23, a Monday
NOON = (TODAY + 0.5) * DAY_SECONDS


def spec(**resources: Any) -> str:
    model = {"preset": "llama-1m", "seq_len": 64}
    train = {"model": model, "data": {"tokens": "/tokens", "batch_size": 8}, "steps": 40}
    stage = {"name": "train", "train": train, "resources": resources}
    return json.dumps({"version": 1, "name": "lm", "stages": [stage]})


EIGHT = spec(gpus_per_node=8, gpu="H100-80GB")


def write(store: FolderStore, run_id: str, stage: StageState, text: str = EIGHT, state: str = "done") -> None:
    synthetic_run.write_run(store, run_id, {"train": stage}, text, state=state)


def events(store: FolderStore, run_id: str, attempt: int, *written: Any) -> None:
    for event in written:
        runs.append_event(store, f"runs/{run_id}/stages/train/attempt-{attempt}", event)


def said(store: FolderStore, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["forecast", "--store", store.url, *arguments], obj=CliSession())


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FolderStore:
    monkeypatch.setattr(time, "time", lambda: NOON)
    return FolderStore(tmp_path / "store")


def test_a_week_goes_on_and_a_quota_is_short_on_its_day(store, monkeypatch):
    from mlpipe.observe import forecast

    monkeypatch.setattr(forecast, "methods", lambda: {forecast.BASELINE: forecast.seasonal_naive})
    for day in range(TODAY - 28, TODAY):
        hours, begin = 1 + day % 7, day * DAY_SECONDS
        write(store, f"run-{day}", StageState("done", 1, "", begin, begin + hours * 3600))
    write(store, "cpu", StageState("done", 1, "", NOON - 7200, NOON), spec(workers_per_node=2))
    store.put("runs/torn/run.json", b"{")
    store.put("index/torn/000001-running", b"")
    done = said(store, "--days", "8", "--quota", "H100-80GB=2", "--quota", "H200=8", "--output", "json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    one, absent = document["classes"]
    assert [day["gpu_hours"] for day in one["forecast"]["days"]] == [
        pytest.approx(8.0 * (1 + day % 7)) for day in range(TODAY, TODAY + 8)
    ]
    # 48 GPU-hours are those of six hours a day, whose day is 20,781's: 1 + 20_781 % 7 is 6
    assert [1 + day % 7 for day in range(TODAY, TODAY + 3)] == [5, 6, 7]
    assert one["short"] == {"expected": "2026-11-25", "possible": "2026-11-25"}
    assert one["history_gpu_hours"] == pytest.approx(4 * 8 * sum(range(1, 8)))
    assert (absent["class"], absent["history_days"], absent["forecast"]) == ("H200", 0, None)
    assert document["unread"] == ["torn"]
    text = said(store, "--quota", "H100-80GB=2").output
    assert "2 GPUs (48 GPU-hours a day) will be short on 2026-11-25" in text
    assert "8 of 10 days" in text
    assert "1 run left out, which cannot be read: torn" in text


def test_hours_are_those_that_a_training_had_from_when_it_was_asked_for(store):
    begin = NOON - 20 * 3600
    # waited 2 hours, ran 1, was killed; asked for again 5 hours later, and runs since then
    write(store, "again", StageState("running", 2, "", begin + 8 * 3600), state="running")
    events(store, "again", 1, Submitted(time=begin), Launched(time=begin + 7200))
    last = {**synthetic_run.step_record(9, 0, 1, random.Random(1)), "time": begin + 10800}
    head = {"v": 1, "kind": "step", "rank": 0, "restart": 0}
    synthetic_run.write_records(store, "runs/again/stages/train/attempt-1", 0, [{**head, **last}])
    events(store, "again", 2, Submitted(time=begin + 8 * 3600), Launched(time=begin + 9 * 3600))
    # a task of an array, whose driver came when it was over
    write(store, "task", StageState("done", 1, "", begin + 9000, begin + 9001))
    events(store, "task", 1, Launched(time=begin), Submitted(time=begin + 9000))
    over = AttemptOutcome("done", time=begin + 3600)
    write_outcome(store, "runs/task/stages/train/attempt-1/outcome.json", over)
    write(store, "waits", StageState("running", 1, "", begin), state="running")
    events(store, "waits", 1, Submitted(time=begin))
    write(
        store,
        "many",
        StageState("failed", 1, "", begin, begin + 60),
        spec(nodes="2..4", gpus_per_node=2, gpu="T4"),
    )
    found = demand(store, 0.0, NOON)
    assert sorted(found.uses, key=lambda use: (use.gpu_class, use.asked)) == [
        Use("H100-80GB", 8, begin, 3600.0),
        Use("H100-80GB", 8, begin, 3600.0),
        Use("H100-80GB", 8, begin + 8 * 3600, 11 * 3600.0),
        Use("T4", 8, begin, 60.0),
    ]


def test_what_nobody_drives_counts_up_to_when_somebody_did(store):
    from dataclasses import replace

    from mlpipe.store.runs import Lease

    write(store, "left", StageState("running", 1, "", NOON - 7200), state="running")
    gone = Lease("driver", "elsewhere", 1, NOON - 3600)
    runs.update_run(store, "left", lambda run: replace(run, driver=gone))
    assert [use.seconds for use in demand(store, 0.0, NOON).uses] == [3600.0]


def test_too_little_is_said(store):
    nothing = said(store)
    assert (nothing.exit_code, "had GPUs" in nothing.output) == (0, True)
    assert "(0 runs)" in nothing.output
    write(store, "cpu", StageState("done", 1, "", NOON - 7200, NOON), spec(workers_per_node=2))
    assert "(1 run)" in said(store).output
    write(store, "one", StageState("done", 1, "", NOON - 9 * DAY_SECONDS, NOON - 9 * DAY_SECONDS + 3600))
    short = said(store)
    assert "9 whole days of history" in short.output
    assert "too short for a forecast, which needs 21 days" in short.output


@pytest.mark.parametrize("quota", ["H100", "H100=", "H100=-3", "=8", "H100=8.5"])
def test_a_quota_is_a_class_and_gpus(store, quota):
    done = said(store, "--quota", quota)
    assert (done.exit_code, "is not CLASS=GPUS" in done.output) == (2, True)
