"""`mlpipe profile` of runs that do not train, and of one that ends instead of answering."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit import synthetic_run
from kit.command_runs import until

from mlpipe._core.errors import MlpipeError
from mlpipe._core.serial import to_json
from mlpipe.cli.app import app
from mlpipe.cli.session import CliSession
from mlpipe.observe.profiles.measure import measure
from mlpipe.observe.profiles.trace import Trace
from mlpipe.store import profiles, runs
from mlpipe.store.open import open_store
from mlpipe.store.profiles import Profile, ProfileRequest
from mlpipe.store.runs import StageState

pytestmark = pytest.mark.unit
STEP = {"ph": "X", "name": "ProfilerStep#3", "cat": "user_annotation", "ts": 0, "dur": 1e5, "tid": 1}


@pytest.fixture
def training(tmp_path):
    """A run whose stage `train` runs, and its store."""
    store = open_store(str(tmp_path))
    runs.create_run(store, "run", "stages: []", "0", ["train"], "local", {})
    plan = synthetic_run.stage_plan("run", "train", work=synthetic_run.train_plan(100))
    store.put("runs/run/stages/train/attempt-1/plan.json", plan.to_json().encode())
    set_state(store, StageState("running", 1))
    return store


def set_state(store, state):
    runs.update_run(store, "run", lambda run: replace(run, stages={"train": state}))


def profile(store, *arguments):
    argv = ["profile", "run", "--store", store.url, *arguments]
    return CliRunner().invoke(app, argv, obj=CliSession(), standalone_mode=False)


def answer(store, key):
    """As a launcher and two ranks do."""
    request = until(lambda: profiles.take(store, key), "the request")
    made = Profile(request.id, 3, request.steps, tuple(request.ranks_of(2)), request.memory, 1.0)
    profiles.write_profile(store, key, made)
    for rank in made.ranks:
        facts = {"rank": rank, "device": "cpu", "first_step": 3}
        summary = measure(Trace({"traceEvents": [STEP], "mlpipe": facts}))
        store.put(profiles.trace_key(key, 3, rank), b"trace")
        store.put(profiles.summary_key(key, 3, rank), to_json(summary).encode())


def test_what_all_ranks_found_is_said_and_traces_are_copied(training, tmp_path):
    key = "runs/run/stages/train/attempt-1"
    thread = threading.Thread(target=answer, args=(training, key))
    thread.start()
    done = profile(
        training, "--ranks", "1,0", "--steps", "1", "--out", str(tmp_path / "out"), "--output", "json"
    )
    thread.join()
    document = json.loads(done.stdout)
    assert [rank["rank"] for rank in document["ranks"]] == [0, 1]
    assert document["profile"]["steps"] == 1
    assert [Path(path).read_bytes() for path in document["traces"]] == [b"trace", b"trace"]
    set_state(training, StageState("done", 1))
    assert "steps 3 to 3, 2 ranks" in profile(training).stdout  # the last one


def test_a_run_that_never_trained_has_none(training):
    set_state(training, StageState("done", 1))
    error = profile(training).exception
    assert isinstance(error, MlpipeError)
    assert error.kind == "input"
    assert "has no profile" in error.message
    assert "at: 100" in str(error.hint)


def test_one_that_ends_meanwhile_is_not_waited_for(training):
    def end():
        until(lambda: profiles.is_asked(training, "runs/run/stages/train/attempt-1"), "the request")
        set_state(training, StageState("done", 1))

    thread = threading.Thread(target=end)
    thread.start()
    error = profile(training).exception
    thread.join()
    assert isinstance(error, MlpipeError), error
    assert "ended before it was profiled" in error.message
    assert not profiles.is_asked(training, "runs/run/stages/train/attempt-1")


def test_one_that_nobody_hears_is_given_up(training):
    error = profile(training, "--timeout", "1").exception
    assert isinstance(error, MlpipeError)
    assert error.kind == "infrastructure"
    assert "for its launcher to hear of it" in error.message
    assert not profiles.is_asked(training, "runs/run/stages/train/attempt-1")


def test_one_that_a_restart_broke_off_is_not_waited_for(training):
    key = "runs/run/stages/train/attempt-1"

    def lose():
        request = until(lambda: profiles.take(training, key), "the request")
        made = Profile(request.id, 3, request.steps, (0, 1), request.memory, 1.0)
        profiles.write_profile(training, key, made)
        with_start = b'{"v": 1, "kind": "start", "time": 2.0, "rank": 0, "restart": 1}\n'
        training.put(f"{key}/records/rank-0.jsonl", with_start)

    thread = threading.Thread(target=lose)
    thread.start()
    error = profile(training).exception
    thread.join()
    assert isinstance(error, MlpipeError), error
    assert "broken off by a restart" in error.message


def test_what_somebody_else_asks_for_stays(training):
    key = "runs/run/stages/train/attempt-1"
    assert profiles.ask(training, key, ProfileRequest("other", 5))
    assert "asks for a profile already" in str(profile(training).exception)
    profiles.withdraw(training, key, "mine")
    assert profiles.take(training, key) == ProfileRequest("other", 5)
    profiles.withdraw(training, key, "other")


@pytest.mark.parametrize("odd", [b"{", b"[]", b'{"id": "a", "steps": 0}', b'{"id": "a", "steps": 1000000}'])
def test_a_request_that_nobody_can_mean_is_dropped(training, odd):
    training.put("runs/run/attempt-1/profiles/wanted.json", odd)
    assert profiles.take(training, "runs/run/attempt-1") is None
    assert not profiles.is_asked(training, "runs/run/attempt-1")


def test_ranks_are_numbers_of_ranks(training):
    assert "there is no rank -1" in str(profile(training, "--ranks=-1,0").exception)
    assert "there is no rank 99" in str(profile(training, "--ranks", "0,99").exception)
    assert "is no list of ranks" in str(profile(training, "--ranks", "all").exception)
