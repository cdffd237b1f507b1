"""The controller of a sweep over trials that train nothing: how many at once, failures, cancels, dead
controllers and drivers, the best one promoted once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit import sweep_backend
from kit.clock import Clock
from kit.command_runs import until
from kit.sweep_backend import Quiet, Simulated

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.api import stopping
from mlpipe.cli import sweep as verb
from mlpipe.cli import sweep_follow
from mlpipe.cli.app import run_app
from mlpipe.cli.session import CliSession
from mlpipe.cli.sweep import exit_code
from mlpipe.observe import sweep_table
from mlpipe.observe.sweep_report import build_report
from mlpipe.plan.hardware import machine_memory_bytes
from mlpipe.spec.load import load_pipeline_text
from mlpipe.store import leases, registry, runs, sweeps
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit import backends, driver, process_executor
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.submission import Console, Submission
from mlpipe.submit.sweeps import cancel, controller, slots
from mlpipe.submit.sweeps.cancel import cancel_sweep
from mlpipe.submit.sweeps.controller import STOPPED, drive_sweep
from mlpipe.submit.sweeps.create import create
from mlpipe.submit.sweeps.promote import promote_best

pytestmark = pytest.mark.unit


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FolderStore]:
    monkeypatch.setitem(backends.TABLE, sweep_backend.NAME, sweep_backend.TARGET)
    monkeypatch.setattr(controller, "_LOOK_SECONDS", (0.005, 0.005))
    monkeypatch.setattr(controller, "_UNDRIVEN_SECONDS", 0.02)
    Simulated.reset()
    yield FolderStore(tmp_path / "store")
    Simulated.go.set()


def made(
    store: FolderStore, folder: Path, over: dict[str, Any], *, console: Console | None = None, **more: Any
) -> str:
    """`more`: keys of the sweep; of them `train` of the training."""
    sweep = {"over": over, "metric": {"name": "loss"}, **more}
    train = {
        **sweep.pop("train", {}),
        "model": {"entry": "a.b:c", "args": {}},
        "data": {"entry": "a.b:d", "batch_size": 8},
        "steps": 6,
    }
    text = json.dumps(
        {"version": 1, "name": "swept", "stages": [{"name": "fit", "train": train}], "sweep": sweep}
    )
    pipeline = load_pipeline_text(text, "pipeline.yaml")
    asked = Submission("pipeline.yaml", text, (), pipeline, store.url, str(folder), run_id="s")
    return create(store, Simulated({}), asked, console or Quiet())


class Heard(Quiet):
    """What is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def drive(store: FolderStore, **more: Any) -> RunState:
    stop, console = more.pop("stop", StopRequest()), more.pop("console", Quiet())
    return drive_sweep(store, "s", stop=stop, console=console, **more)


class Killed(BaseException):
    pass


def stop_first_trial(store: FolderStore, why: str) -> None:
    """Until its driver has let go."""
    runs.request_cancel(store, "s-000", why)
    until(lambda: runs.read_run(store, "s-000").state == "cancelled", "the trial to stop")
    let_go(store, "s-000")


def let_go(store: FolderStore, run_id: str) -> None:
    until(lambda: runs.read_run(store, run_id).driver is None, "its driver to let go")


def drive_until_all_run(store: FolderStore, number: int) -> None:
    """Its controller is killed then."""

    def watch(sweep: RunState) -> None:
        if len(Simulated.started) == number:
            raise Killed

    with pytest.raises(Killed):
        drive(store, watch=watch)


def states(store: FolderStore) -> dict[str, str]:
    return {name: trial.state for name, trial in runs.read_run(store, "s").stages.items()}


def test_as_many_at_once_as_asked_for_and_the_best_is_named(store, tmp_path):
    made(store, tmp_path, {"model.args.floor": [0.3, 0.1, 0.2], "seed": "0..1"}, max_parallel=2)
    seen = set[int]()

    def watch(sweep: RunState) -> None:
        seen.add(sum(trial.state == "running" for trial in sweep.stages.values()))

    sweep = drive(store, watch=watch)
    assert sweep.state == "done"
    assert exit_code(sweep) == 0
    assert set(states(store).values()) == {"done"}
    assert max(seen) == 2
    assert sweeps.best(sweep) == "002"  # the first of two with equal values
    assert [row.trial for row in sweep_table.trial_rows(store, sweep)][:2] == ["002", "003"]
    document = sweep_table.document(store, sweep)
    assert document["best_run_id"] == "s-002"
    trial = document["trials"][2]
    assert trial["values"] == {"stages.fit.train.model.args.floor": 0.1, "stages.fit.train.seed": 0}
    assert trial["value"] == pytest.approx(0.1 + sum(1 / step for step in range(1, 7)) / 6)
    assert runs.read_run(store, "s-002").meta["sweep"] == "s"
    assert max(Simulated.started.values()) == 1


class Scenario(Clock):
    """Each sleep is a moment at which something happens."""

    def __init__(self, *moments: Callable[[], Any]) -> None:
        super().__init__()
        self.moments = list(moments)

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.moments:
            self.moments.pop(0)()


def test_who_follows_a_trial_ends_as_it_does_and_not_as_an_earlier_attempt_did(store, tmp_path, monkeypatch):
    def stands(sweep: str, trial: str, **more: Any) -> None:
        def change(run: RunState) -> RunState:
            one = replace(run.stages["000"], state=trial, **more)
            return replace(run, state=sweep, stages={**run.stages, "000": one})

        runs.update_run(store, "s", change)

    session = CliSession()
    session.quiet = True
    scenario = Scenario(
        lambda: made(store, tmp_path, {"model.args.floor": [0.3, 0.1]}),  # it has not begun
        lambda: stands("running", "running"),
        lambda: stands("cancelled", "cancelled"),  # of the build before, say
        lambda: runs.reopen(store, "s", (), again=["000"]),
        lambda: stands("running", "running"),
        lambda: stands("running", "done", outcome={"value": 0.5}),
    )
    monkeypatch.setattr(sweep_follow, "time", scenario)
    assert sweep_follow.follow_trial(session, store, "s", "000") == 0
    assert not scenario.moments
    with pytest.raises(StoreError, match="no trial '002'"):
        sweep_follow.follow_trial(session, store, "s", "002")
    before = scenario.now
    with pytest.raises(SubmitError, match="nobody has driven sweep s for 300 s") as caught:
        sweep_follow.follow_trial(session, store, "s", "001")  # which waits
    assert caught.value.kind == "infrastructure"
    assert 300 < scenario.now - before < 310
    # a sweep that was driven and has ended goes on no more; one that ended before may, for a minute
    runs.reopen(store, "s", (), again=["000"])
    stands("running", "running")
    stands("failed", "failed")
    before = scenario.now
    assert sweep_follow.follow_trial(session, store, "s", "000") == 3
    assert 60 < scenario.now - before < 70
    # of one whose driver has ended, as the build knows that had it, nothing more is awaited
    before = scenario.now
    assert sweep_follow.follow_trial(session, store, "s", "000", waits=False) == 3
    with pytest.raises(SubmitError, match="trial 001 has not ended, and nobody drives sweep s any more"):
        sweep_follow.follow_trial(session, store, "s", "001", waits=False)
    assert scenario.now - before < 5
    runs.reopen(store, "s", (), again=["000"])
    stands("running", "running")
    leases.take_lease(store, "s", "me", 3000)
    scenario.moments = [lambda: stands("failed", "failed")]
    before = scenario.now
    assert sweep_follow.follow_trial(session, store, "s", "000") == 3
    assert scenario.now - before < 5
    for state, outcome, code in (
        ("failed", {}, 3), ("failed", {"kind": "infrastructure"}, 4), ("cancelled", {}, 5),
        ("cancelled", {"stopped_at": 9}, 0), ("skipped", {}, 5),
    ):  # fmt: skip
        assert sweep_follow.exit_code(StageState(state, 1, outcome=outcome)) == code


def test_more_is_better_where_the_metric_says_so(store, tmp_path):
    over = {"model.args.floor": [0.3, 0.1]}
    made(store, tmp_path, over, metric={"name": "loss", "mode": "max"})
    sweep = drive(store)
    assert sweeps.best(sweep) == "000"
    assert sweeps.ranked(sweep) == ["000", "001"]


def test_a_trial_that_fails_stops_no_other_and_alone_it_fails_the_sweep(store, tmp_path):
    made(store, tmp_path, {"model.args.fails": [True, False]})
    sweep = drive(store)
    assert states(store) == {"000": "failed", "001": "done"}
    assert sweep.state == "done"
    assert "1 of 2 failed" in sweep.message
    assert sweep.stages["000"].message == "it was asked to fail"
    assert sweeps.value_of(sweep.stages["000"]) is None


def test_a_sweep_without_a_single_value_has_failed(store, tmp_path):
    made(store, tmp_path, {"model.args.fails": [True]})
    sweep = drive(store)
    assert sweep.state == "failed"
    assert exit_code(sweep) == 3


def test_trials_outlive_their_controller_and_the_next_one_follows_them(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..2"}, max_parallel=2)
    drive_until_all_run(store, 2)
    assert states(store) == {"000": "running", "001": "running", "002": "pending"}
    Simulated.go.set()
    assert drive(store).state == "done"
    assert dict(Simulated.started) == {"s-000": 1, "s-001": 1, "s-002": 1}


def test_a_second_controller_is_refused(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True]})
    problem: list[StoreError] = []

    def watch(sweep: RunState) -> None:
        if not problem:
            with pytest.raises(StoreError, match="is driven by") as caught:
                drive(store)
            problem.append(caught.value)
            Simulated.go.set()

    assert drive(store, watch=watch).state == "done"
    assert problem[0].kind == "input"


def test_a_stop_saves_all_trials_and_a_resume_goes_on_with_what_was_stopped(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [False, True], "seed": "0..1"}, max_parallel=2)
    stop = StopRequest()

    def watch(sweep: RunState) -> None:
        if len(Simulated.started) == 4:
            stop.request("interrupted", "stopped by SIGINT")

    sweep = drive(store, stop=stop, watch=watch)
    assert sweep.state == "cancelled"
    assert exit_code(sweep) == 5
    assert states(store) == {"000": "done", "001": "done", "002": "cancelled", "003": "cancelled"}
    assert sweep.stages["002"].message == STOPPED
    Simulated.go.set()
    assert drive(store).state == "done"
    assert dict(Simulated.started) == {"s-000": 1, "s-001": 1, "s-002": 2, "s-003": 2}
    assert runs.read_run(store, "s-002").stages["fit"].attempt == 2


def test_a_trial_whose_driver_has_not_let_go_yet_goes_on(store, tmp_path, monkeypatch):
    """The sweep goes on just after its stop: the trial has ended, and its lease is live."""
    made(store, tmp_path, {"model.args.waits": [True]}, max_parallel=1)
    seen, release, is_driven = threading.Event(), HeldLease.__exit__, leases.is_driven

    def leave(self, *error):
        assert self._run_id != "s-000" or seen.wait(60)
        release(self, *error)

    def look(store, run):
        driven = is_driven(store, run)
        if driven and run.run_id == "s-000" and run.state == "cancelled":
            seen.set()
        return driven

    monkeypatch.setattr(HeldLease, "__exit__", leave)
    monkeypatch.setattr(leases, "is_driven", look)
    stop = StopRequest()
    watch = lambda sweep: Simulated.started and stop.request("interrupted", "stopped by SIGINT")  # noqa: E731
    assert drive(store, stop=stop, watch=watch).state == "cancelled"
    assert not seen.is_set()
    Simulated.go.set()
    assert drive(store).state == "done"
    assert dict(Simulated.started) == {"s-000": 2}


def test_a_trial_that_somebody_cancels_stays_so_until_somebody_resumes_it(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=2)
    asked = False

    def watch(sweep: RunState) -> None:
        nonlocal asked
        if len(Simulated.started) == 2 and not asked:
            asked = True
            runs.request_cancel(store, "s-000", "by hand")
        if sweep.stages["000"].state == "cancelled":
            Simulated.go.set()

    sweep = drive(store, watch=watch)
    assert sweep.state == "done"
    assert states(store) == {"000": "cancelled", "001": "done"}
    assert drive(store).seq == sweep.seq  # nothing to do
    runs.reopen(store, "s-000")
    backend = Simulated({})
    pipeline = load_pipeline_text(
        runs.read_pipeline(store, "s-000"), "p", overrides=runs.read_run(store, "s-000").meta["set"]
    )
    backend.start_driver(store, runs.read_run(store, "s-000"), pipeline, None)
    until(lambda: runs.read_run(store, "s-000").state == "done", "the trial")
    assert drive(store).stages["000"].state == "done"
    assert Simulated.started["s-000"] == 2


def test_a_sweep_whose_trials_somebody_cancels_is_cancelled_and_goes_on_with_none(store, tmp_path):
    """As by `scancel` of all of its array."""
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=2)

    def watch(sweep: RunState) -> None:
        for run_id in list(Simulated.started):
            runs.request_cancel(store, run_id, "by hand")

    sweep = drive(store, watch=watch)
    assert (sweep.state, sweep.message) == ("cancelled", "no trial has a 'loss'")
    assert drive(store).seq == sweep.seq


def test_a_trial_that_failed_and_was_resumed_and_cancelled_by_hand_is_not_trained_again(store, tmp_path):
    made(store, tmp_path, {"model.args.fails": [True, False]})
    assert states(drive(store) and store) == {"000": "failed", "001": "done"}
    runs.reopen(store, "s-000")
    runs.request_cancel(store, "s-000", "by hand")
    driver.cancel(store, "s-000", "by hand", timeout_seconds=10.0)
    assert runs.read_run(store, "s-000").state == "cancelled"
    started = dict(Simulated.started)
    drive(store)
    assert Simulated.started == started


def test_what_was_judged_at_a_rung_stays_when_a_trial_passes_it_again(store, tmp_path):
    """As one does that goes on from an earlier checkpoint."""
    more = {"method": "asha", "trials": 2, "eta": 2, "min_steps": 2}
    made(store, tmp_path, {"seed": "0..5"}, **more)
    judging = object.__new__(controller._Controller)
    judging._sweep = sweep_of_text(store)
    judging.state = runs.read_run(store, "s")
    judging._update = lambda change: setattr(judging, "state", change(judging.state))  # type: ignore[method-assign]
    assert judging._arrive("000", 2, 0.5, False) is None
    assert judging._arrive("001", 2, 0.7, False) == 2
    for value in (0.1, 0.9):
        assert judging._arrive("000", 2, value, False) is None
        assert judging._arrive("001", 2, value, False) is None
    assert judging.state.meta["rungs"] == {"2": {"000": 0.5, "001": 0.7}}
    assert judging.state.stages["001"].outcome == {"stopped_at": 2, "value": 0.7}


def sweep_of_text(store: FolderStore) -> Any:
    return load_pipeline_text(runs.read_pipeline(store, "s"), "pipeline.yaml").sweep


def test_a_driver_that_died_is_replaced(store, tmp_path):
    made(store, tmp_path, {"model.args.dies": [True]})
    assert drive(store).state == "done"
    assert Simulated.started["s-000"] == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of its driver
def test_a_run_that_was_deleted_is_a_failed_trial(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=2)

    def watch(sweep: RunState) -> None:
        if len(Simulated.started) == 2 and store.exists("runs/s-000/run.json"):
            store.delete(["runs/s-000/run.json"])
            Simulated.go.set()

    drive(store, watch=watch)
    assert states(store) == {"000": "failed", "001": "done"}


def test_a_store_that_is_away_for_a_while_stops_nothing(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"seed": "0..1"})
    whole, away = runs.read_run, [3]

    def read_run(of: Any, run_id: str, **more: Any) -> RunState:
        if run_id == "s-000" and away[0]:
            away[0] -= 1
            raise StoreError("out of reach")
        return whole(of, run_id, **more)

    monkeypatch.setattr(controller.runs, "read_run", read_run)
    assert drive(store).state == "done"
    assert away == [0]


class Given:
    """A place that starts trials by itself: those are begun that `waits` does not name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, waits: list[str]) -> None:
        self.waits = dict.fromkeys(waits, "it is new")
        self.taken = False
        self.lost: dict[str, str] = {}
        self.fresh: list[list[str]] = []
        self.cancelled: list[list[str]] = []
        monkeypatch.setattr(Simulated, "has_batches", True)
        monkeypatch.setattr(Simulated, "batch", lambda _, store, sweep, fresh, *more: self._of(fresh))

    def _of(self, fresh: Any) -> Given:
        self.fresh.append(list(fresh))
        return self

    def meta(self) -> dict[str, Any]:
        return {"name": "array", "taken": self.taken}

    def waiting(self) -> dict[str, str]:
        self.taken = True
        return dict(self.waits)

    def gone(self) -> dict[str, str]:
        return self.lost

    def trial(self, name: str) -> dict[str, str]:
        return {"job": name}

    def take_back(self, name: str) -> None:
        if self.waits.pop(name, None) is not None:
            self.lost[name] = "somebody cancelled it"

    def cancel(self, but: Any) -> bool:
        self.cancelled.append(sorted(but))
        return len(self.cancelled) > 1  # it takes a while


def test_trials_that_their_place_starts_get_drivers_once_they_have_begun(store, tmp_path, monkeypatch):
    """The last one is cancelled there before it began: it is a run all the same, which can be resumed."""
    made(store, tmp_path, {"seed": "0..3"}, max_parallel=1)
    there = Given(monkeypatch, ["000", "001", "002", "003"])
    looks = 0

    def watch(sweep: RunState) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            assert not Simulated.started
            assert (sweep.stages["000"].message, sweep.meta["batch"]) == ("it is new", there.meta())
            there.waits = {"001": "", "003": ""}
        if Simulated.started and not there.lost and sweep.stages["002"].state == "done":
            assert "s-001" not in Simulated.started
            there.waits, there.lost = {}, {"003": "somebody cancelled it"}

    sweep = drive(store, watch=watch)
    assert sweep.state == "done"
    assert [*states(store).values()] == ["done", "done", "done", "cancelled"]
    run = runs.read_run(store, "s-003")
    assert (run.state, run.message, run.meta["batch"]) == (
        "cancelled",
        "somebody cancelled it",
        {"job": "003"},
    )
    assert drive(store).seq == sweep.seq  # nothing to do
    assert there.fresh == [["000", "001", "002", "003"]]


@pytest.mark.parametrize("with_batch", [True, False])
def test_a_trial_that_waits_says_for_what_and_is_cancelled_alone(
    store, tmp_path, monkeypatch, capsys, with_batch
):
    """By its controller, then, without one, in its place; a resume of the sweep begins neither."""
    monkeypatch.setenv("MLPIPE_STORE", store.url)

    def said(verb: str, run_id: str, code: int = 0) -> str:
        with pytest.raises(SystemExit, match=str(code)):
            run_app([verb, run_id])
        return "".join(capsys.readouterr()).strip()

    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..3"}, max_parallel=1)
    there = Given(monkeypatch, ["001", "002", "003"]) if with_batch else None
    stop, ended = StopRequest(), list[RunState | None]()
    thread = threading.Thread(target=lambda: ended.append(drive(store, stop=stop)))
    thread.start()
    until(lambda: Simulated.started["s-000"], "the first trial")
    why = "it is new" if with_batch else "it waits for one of those that run (000)"
    until(lambda: said("status", "s-001") == f"trial 001 of sweep s has not begun: {why}", "the words")
    assert said("logs", "s-001") == f"no logs: trial 001 of sweep s has not begun: {why}"
    for asked in ("report", "top", "spec"):
        assert "s-001 is a trial of sweep s that has not begun" in said(asked, "s-001", code=2)
    assert stopping.stop_run(store, "s-002", Quiet(), timeout_seconds=300).state == "cancelled"
    assert states(store) == {"000": "running", "001": "pending", "002": "cancelled", "003": "pending"}
    stop.request("interrupted", "stopped by SIGINT")
    thread.join(300)
    assert "has not begun, and nobody drives the sweep; go on with" in said("status", "s-001")
    if there is not None:
        there.cancelled.clear()
    run = stopping.stop_run(store, "s-003", Quiet(), timeout_seconds=300)
    assert (run.state, run.message.split()[0], run.meta["sweep"]) == ("cancelled", "cancelled", "s")
    if there is not None:
        assert there.cancelled == [["000", "001", "002"]] * 2
        there.waits.clear()
    Simulated.go.set()
    assert drive(store).state == "done"
    assert states(store) == {"000": "done", "001": "done", "002": "cancelled", "003": "cancelled"}
    assert set(Simulated.started) == {"s-000", "s-001"}


def test_a_stop_takes_back_what_has_not_begun_with_and_without_a_controller(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..2"}, max_parallel=1)
    there, stop = Given(monkeypatch, ["001", "002"]), StopRequest()

    def watch(sweep: RunState) -> None:
        if Simulated.started:
            stop.request("interrupted", "stopped by SIGINT")

    assert drive(store, stop=stop, watch=watch).state == "cancelled"
    assert there.cancelled[0] == ["000"], "which saves, with its driver"
    assert len(there.cancelled) >= 2, "until they have ended"
    there.cancelled.clear()
    drive_until_all_run(store, 1)
    assert cancel_sweep(store, "s", "by hand", timeout_seconds=300).state == "cancelled"
    assert len(there.cancelled) == 2
    assert there.fresh[1] == ["001", "002"]
    # 001 had begun there before it was taken back, and had no driver yet: it goes on as the others do
    write_outcome(store, "runs/s-001/stages/fit/attempt-1/outcome.json", AttemptOutcome("saved"))
    there.waits.clear()
    Simulated.go.set()
    assert drive(store).state == "done"
    assert [runs.read_run(store, f"s-00{n}").stages["fit"].attempt for n in range(3)] == [3, 2, 1]


def test_a_second_signal_does_not_leave_before_what_has_not_begun_is_taken_back(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"seed": "0..2"}, max_parallel=1)
    there, stop = Given(monkeypatch, ["000", "001", "002"]), StopRequest()

    def watch(sweep: RunState) -> None:
        stop.request("interrupted", "stopped by SIGINT")
        raise KeyboardInterrupt

    assert drive(store, stop=stop, watch=watch).state == "cancelled"
    assert len(there.cancelled) == 2


def test_cancel_without_a_controller_stops_the_trials_and_a_resume_brings_them_back(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..2"}, max_parallel=2)
    drive_until_all_run(store, 2)
    sweep = cancel_sweep(store, "s", "by hand", timeout_seconds=300)
    assert sweep.state == "cancelled"
    assert states(store) == {"000": "cancelled", "001": "cancelled", "002": "skipped"}
    assert runs.read_run(store, "s-001").state == "cancelled"
    Simulated.go.set()
    assert drive(store).state == "done"


def test_cancel_asks_a_live_controller(store, tmp_path):
    made(store, tmp_path, {"model.args.waits": [True]})
    sweeps_state: list[RunState] = []
    thread = threading.Thread(target=lambda: sweeps_state.append(drive(store)))
    thread.start()
    until(lambda: Simulated.started["s-000"], "the trial")
    assert cancel_sweep(store, "s", "by hand", timeout_seconds=300).state == "cancelled"
    thread.join(300)
    assert sweeps_state[0].message == "by hand"


def test_cancel_waits_for_a_controller_that_has_ended_to_let_go(store, tmp_path, monkeypatch):
    """Which left a trial that waits for a deletion."""
    made(store, tmp_path, {"model.args.waits": [True]})
    runs.update_run(
        store, "s", lambda run: replace(run, state="cancelled", stages={"000": StageState("running", 1)})
    )
    with HeldLease(store, "s") as held:
        monkeypatch.setattr(cancel, "time", Scenario())
        with pytest.raises(SubmitError, match="has not stopped within 5 s"):
            cancel_sweep(store, "s", "by hand", timeout_seconds=5)
        scenario = Scenario(lambda: None, held.__exit__)
        monkeypatch.setattr(cancel, "time", scenario)
        assert cancel_sweep(store, "s", "by hand", timeout_seconds=5).message == "by hand"
    assert not scenario.moments
    assert states(store) == {"000": "skipped"}


def test_asha_stops_what_is_not_among_the_best_at_a_rung_saved_and_once(store, tmp_path):
    over = {"model.args.floor": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "model.args.rungs": [[2, 4]]}
    more = {"method": "asha", "trials": 6, "eta": 2, "min_steps": 2, "seed": 1}
    made(store, tmp_path, over, **more)  # one after the other: rungs at the steps 2 and 4 of 6
    sweep = drive(store)
    arrived = {step: list(there.items()) for step, there in sweep.meta["rungs"].items()}
    assert [*arrived] == ["2", "4"]
    assert [name for name, _ in arrived["2"]] == sorted(sweep.stages)
    stopped = {
        name: trial.outcome["stopped_at"]
        for name, trial in sweep.stages.items()
        if "stopped_at" in trial.outcome
    }
    for step in (2, 4):
        values = [value for _, value in arrived[str(step)]]
        for number, (name, value) in enumerate(arrived[str(step)]):
            better = sum(other < value for other in values[:number])
            assert (stopped.get(name) == step) == (better >= max(1, (number + 1) // 2))
    assert stopped
    assert {name for name, trial in sweep.stages.items() if trial.state == "done"} == set(sweep.stages) - set(
        stopped
    )
    for name in stopped:
        run = runs.read_run(store, f"s-{name}")
        assert run.state == "cancelled"
        assert run.message == f"stopped by asha at step {stopped[name]}"
        assert list(store.list(f"runs/s-{name}/stages/fit/checkpoints"))
    assert sweep.state == "done"
    assert {row.shown_state for row in sweep_table.trial_rows(store, sweep)} == {"done", "stopped"}
    assert drive(store).seq == sweep.seq  # those that were stopped stay so
    assert set(Simulated.started.values()) == {1}


def test_a_validation_is_a_metric_at_the_end_and_at_a_rung(store, tmp_path):
    over = {"model.args.floor": [0.1, 0.5], "model.args.rungs": [[4]]}
    more = {
        "method": "asha",
        "trials": 2,
        "eta": 2,
        "min_steps": 3,
        "seed": 1,
        "metric": {"name": "val_loss"},
    }
    made(store, tmp_path, over, train={"validate": {"every": "2 steps"}}, **more)
    sweep = drive(store)
    floors = [values["stages.fit.train.model.args.floor"] for values in sweep.meta["trials"].values()]
    assert floors == [0.1, 0.5]
    assert sweep.meta["rungs"] == {"3": {"000": 2 * (0.1 + 1 / 4), "001": 2 * (0.5 + 1 / 4)}}
    assert sweeps.value_of(sweep.stages["000"]) == pytest.approx(2 * (0.1 + 1 / 6))
    assert sweep.stages["001"].message == "stopped by asha at step 3"
    page = build_report(store, sweep)
    assert "<h3>val_loss" in page
    assert "<h3>Training loss" not in page


def test_what_asha_has_written_and_not_done_the_next_controller_does(store, tmp_path, monkeypatch):
    over = {"model.args.floor": [0.1, 0.9], "model.args.rungs": [[1]]}
    made(store, tmp_path, over, method="asha", trials=2, eta=2, min_steps=1, seed=1)

    class Killed(BaseException):
        pass

    def killed(self: object, name: str, following: object, why: str) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(controller._Controller, "_ask_to_stop", killed)
        with pytest.raises(Killed):
            drive(store)
    before = runs.read_run(store, "s")
    (judged,) = [name for name, trial in before.stages.items() if "stopped_at" in trial.outcome]
    assert before.stages[judged].state == "running"
    after = drive(store)
    assert after.state == "done"
    assert after.stages[judged].message == "stopped by asha at step 1"
    assert set(Simulated.started.values()) == {1}


TPE = {
    "over": {
        "model.args.floor": {"min": 0.0, "max": 1.0},
        "model.args.kind": [{"a": 1}, [2], "three"],
        "model.args.width": {"min": 1, "max": 64, "log": True},
    },
    "method": "tpe",
    "trials": 16,
}


def test_a_controller_that_takes_over_suggests_what_the_one_before_would_have(store, tmp_path):
    made(store, tmp_path, **TPE)
    whole = drive(store)
    assert whole.state == "done"
    again = FolderStore(tmp_path / "again")
    made(again, tmp_path, **TPE)

    class Killed(BaseException):
        pass

    while runs.read_run(again, "s").state != "done":
        looks = 0

        def watch(sweep: RunState) -> None:
            nonlocal looks
            looks += 1
            if looks == 20:
                raise Killed

        with contextlib.suppress(Killed):
            drive(again, watch=watch)
    assert runs.read_run(again, "s").meta["trials"] == whole.meta["trials"]
    late = [whole.meta["trials"][f"{number:03d}"] for number in range(10, 16)]
    assert fmean(values["stages.fit.train.model.args.floor"] for values in late) < 0.4  # it has learned


def test_without_optuna_tpe_is_refused_before_anything_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SubmitError, match="needs Optuna"):
        made(store, tmp_path, **TPE)
    assert not store.exists("runs/s/run.json")


def test_the_best_is_promoted_once(store, tmp_path):
    over = {"model.args.floor": [0.2, 0.1]}
    made(store, tmp_path, over, promote={"as": "swept", "alias": "best"})
    sweep = drive(store)
    assert sweep.meta["promoted"] == {"model": "swept", "version": 1, "alias": "best", "trial": "001"}
    assert promote_best(store, sweep, "swept", "best")["version"] == 1
    model = registry.show_model(store, "swept", "best")
    assert model.lineage["run"] == "s-001"


def test_what_could_not_be_promoted_is_by_a_resume(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.floor": [0.2, 0.1]}, promote={"as": "swept"})

    def refused(*_: object) -> None:
        raise StoreError("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(controller, "promote_best", refused)
        sweep = drive(store)
    assert sweep.state == "failed"
    assert "not promoted: out of reach" in sweep.message
    sweep = drive(store)
    assert sweep.state == "done"
    assert sweep.meta["promoted"]["version"] == 1
    assert dict(Simulated.started) == {"s-000": 1, "s-001": 1}


def test_what_the_command_line_promotes_is_promoted_instead_of_what_the_file_says(store, tmp_path):
    made(store, tmp_path, {"model.args.floor": [0.2, 0.1]}, promote={"as": "swept"})
    session = CliSession()
    session.quiet = True
    assert verb.drive(session, store, "s", "other@best") == 0
    models, _ = registry.list_models(store)
    assert [(model.name, model.aliases) for model in models] == [("other", ("best",))]


def test_a_run_that_has_a_trials_id_and_is_another_one_is_not_taken_for_it(store, tmp_path):
    def forget() -> None:
        store.delete([info.key for info in store.list("runs/s/")])

    over = {"model.args.floor": [0.3, 0.2], "model.args.fails": [False]}
    made(store, tmp_path, over)
    first = drive(store)
    forget()
    made(store, tmp_path, over)  # the very same: they are its trials
    runs.update_run(
        store, "s-001", lambda run: replace(run, meta={**run.meta, "set": [*run.meta["set"], "fit.steps=9"]})
    )
    assert sweeps.best(drive(store)) == sweeps.best(first)
    assert set(Simulated.started.values()) == {1}
    forget()
    made(store, tmp_path, {**over, "model.args.floor": [0.3, 0.9]})  # another file
    sweep = drive(store)
    assert states(store) == {"000": "failed", "001": "failed"}
    assert "choose another --sweep-id" in sweep.stages["000"].message
    assert exit_code(sweep) == 2
    runs.update_run(store, "s-000", lambda run: replace(run, meta={**run.meta, "set": ["sweep=null"]}))
    forget()
    made(store, tmp_path, over)
    drive(store)  # the same file with other overrides
    assert states(store) == {"000": "failed", "001": "done"}


def test_the_end_of_the_last_trial_is_not_lost_with_a_request_to_the_store(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.floor": [0.2, 0.1]})
    whole, away = runs.update_run, [2]

    def update_run(of: Any, run_id: str, change: Any) -> RunState:
        def changed(run: RunState) -> RunState:
            new = change(run)
            if run_id == "s" and new.stages["001"].state == "done" and away[0]:
                away[0] -= 1
                raise StoreError("out of reach")
            return new

        return whole(of, run_id, changed)

    monkeypatch.setattr(controller.runs, "update_run", update_run)
    sweep = drive(store)
    assert away == [0]
    assert (sweep.state, sweeps.best(sweep)) == ("done", "001")


def test_a_driver_that_cannot_be_replaced_fails_its_trial_alone(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.dies": [True, False]}, max_parallel=2)
    whole = Simulated.start_driver

    def start_driver(self: Simulated, store: Any, run: RunState, *more: Any) -> None:
        if Simulated.started[run.run_id]:
            raise SubmitError("no room for a driver")
        whole(self, store, run, *more)

    monkeypatch.setattr(Simulated, "start_driver", start_driver)
    assert drive(store).stages["000"].message == "no room for a driver"
    assert states(store) == {"000": "failed", "001": "done"}


def test_a_driver_that_forgets_that_it_was_asked_to_stop_is_asked_again(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.waits": [True]})
    whole, forgets, stop = runs.cancel_requested, [3], StopRequest()

    def cancel_requested(of: Any, run_id: str) -> str | None:
        why = whole(of, run_id)
        if run_id == "s-000" and why is not None and forgets[0]:
            forgets[0] -= 1
            store.delete(["runs/s-000/cancel"])
            return None
        return why

    monkeypatch.setattr(runs, "cancel_requested", cancel_requested)

    def watch(sweep: RunState) -> None:
        stop.request("interrupted", "stopped by SIGINT")

    assert drive(store, stop=stop, watch=watch).state == "cancelled"
    assert states(store) == {"000": "cancelled"}
    assert forgets == [0]


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_a_driver_starts_stops_it_and_starts_no_other(store, tmp_path, monkeypatch, signals):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..2"}, max_parallel=3)
    whole, stop = Simulated.start_driver, StopRequest()

    def start_driver(self: Simulated, *more: Any) -> None:
        whole(self, *more)
        stop.request("interrupted", "stopped by SIGINT")
        if signals == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Simulated, "start_driver", start_driver)
    assert drive(store, stop=stop).state == "cancelled"
    assert dict(Simulated.started) == {"s-000": 1}
    until(lambda: runs.read_run(store, "s-000").message == STOPPED, "the trial to hear it")


def test_a_second_signal_ends_drivers_here_though_the_store_is_away(store, tmp_path, monkeypatch):
    made(store, tmp_path, {"model.args.waits": [True]})
    monkeypatch.setattr(Simulated, "has_own_driver", False)
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        Simulated.go.set()

    def away(*_: object) -> None:
        raise StoreError("out of reach")

    monkeypatch.setattr(controller.os, "kill", kill)
    monkeypatch.setattr(runs, "request_cancel", away)
    stop = StopRequest()

    def watch(sweep: RunState) -> None:
        if runs.read_run(store, "s-000").driver is not None:
            stop.request("interrupted", "stopped by SIGINT")
            raise KeyboardInterrupt

    assert drive(store, stop=stop, watch=watch).state == "cancelled"
    assert killed[0] == (os.getpid(), signal.SIGTERM)
    assert states(store) == {"000": "done"}


@pytest.mark.parametrize(
    ("why", "then", "drivers"),
    [("by hand", "cancelled", 1), (STOPPED, "done", 2), ("stopped by SIGTERM", "done", 2)],
)
def test_a_trial_that_ended_without_a_controller_is_gone_on_with_if_the_sweep_stopped_it(
    store, tmp_path, why, then, drivers
):
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=2)
    drive_until_all_run(store, 2)
    stop_first_trial(store, why)
    Simulated.go.set()
    assert drive(store).state == "done"
    assert states(store) == {"000": then, "001": "done"}
    assert Simulated.started["s-000"] == drivers


@pytest.mark.parametrize("late", [False, True])
def test_a_trial_whose_checkpoints_are_being_deleted_waits_for_that_and_goes_on(
    store, tmp_path, monkeypatch, late
):
    """It was taken for driven, and for ended as its sweep had stopped it; no other takes its place. What it
    waits for is said once, and a stop waits for it again once it runs. `late`: the deletion begins while it
    gets its driver."""
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=1)
    drive_until_all_run(store, 1)
    stop_first_trial(store, STOPPED)
    seen: list[dict[str, str]] = []
    console, stop = Heard(), StopRequest()
    held, whole = HeldLease(store, "s-000", deletes=True), Simulated.start_driver

    def start_driver(self: Simulated, *more: Any) -> None:
        if not seen:
            held.__enter__()
        whole(self, *more)

    def watch(sweep: RunState) -> None:
        seen.append(states(store))
        if len(seen) == 3:
            held.__exit__()
        if sum(Simulated.started.values()) == 2:
            stop.request("cancelled", "enough")

    if late:
        monkeypatch.setattr(Simulated, "start_driver", start_driver)
    else:
        held.__enter__()
    assert drive(store, watch=watch, console=console, stop=stop).state == "cancelled"
    assert seen[:3] == [{"000": "running", "001": "pending"}] * 3
    (told,) = console.notes
    assert told.startswith(
        f"trial 000 waits: checkpoints of run s-000 are being deleted by process {os.getpid()}"
    )
    assert states(store) == {"000": "cancelled", "001": "pending"}
    let_go(store, "s-000")
    Simulated.go.set()
    assert drive(store).state == "done"
    assert dict(Simulated.started) == {"s-000": 3, "s-001": 1}


@pytest.mark.parametrize("ends", [False, True])
def test_a_sweep_that_is_stopped_leaves_a_trial_whose_checkpoints_are_being_deleted(
    store, tmp_path, monkeypatch, ends
):
    """Nobody waits for the deletion. Where it `ends` while another trial saves, no driver is begun only to be
    stopped. Who goes on waits for it, though no other trial is left."""
    made(store, tmp_path, {"model.args.waits": [True], "seed": "0..1"}, max_parallel=2)
    drive_until_all_run(store, 2)
    stop_first_trial(store, STOPPED)
    stop, whole = StopRequest(), runs.cancel_requested
    other: list[str] = []

    def cancel_requested(of: Any, run_id: str) -> str | None:
        return whole(of, run_id) if len(other) > 3 else None  # it is slow to save

    def watch(sweep: RunState) -> None:
        other.append(sweep.stages["001"].state)
        assert other.count("cancelled") < 2, "the sweep waits"
        stop.request("cancelled", "enough")
        if ends and len(other) == 2:
            held.__exit__()

    monkeypatch.setattr(runs, "cancel_requested", cancel_requested)
    with HeldLease(store, "s-000", deletes=True) as held:
        ended = drive(store, stop=stop, watch=watch)
    assert (ended.state, ended.message) == ("cancelled", "enough")
    assert states(store) == {"000": "running", "001": "cancelled"}
    assert dict(Simulated.started) == {"s-000": 1, "s-001": 1}
    let_go(store, "s-001")
    Simulated.go.set()

    def until_the_other_is_done(sweep: RunState) -> None:
        if sweep.stages["001"].state == "done":
            held.__exit__()

    with HeldLease(store, "s-000", deletes=True) as held:
        drive(store, watch=until_the_other_is_done)
    assert states(store) == {"000": "done", "001": "done"}


def test_trials_that_would_have_no_gpu_are_refused_before_anything_is_written(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Simulated, "has_own_driver", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    def check(self: Simulated, *_: Any, **more: Any) -> None:
        if not os.environ["CUDA_VISIBLE_DEVICES"]:
            raise SubmitError("needs a GPU", hint="ask for none", kind="input")

    monkeypatch.setattr(Simulated, "check", check)
    with pytest.raises(SubmitError, match=r"ask for none; .* lower sweep.max_parallel"):
        made(store, tmp_path, {"seed": "0..1"}, max_parallel=2)
    assert not store.exists("runs/s/run.json")
    made(store, tmp_path, {"seed": [1]}, max_parallel=2)  # one trial has the one GPU


@pytest.mark.parametrize(("gpus", "told"), [("0", ["1 of 0", "2 of 0"]), ("0,1,2", ["2 of 1"])])
def test_what_is_noted_of_parts_of_a_machine_is_said_once(store, tmp_path, monkeypatch, gpus, told):
    """Of that part which lacks the more."""
    monkeypatch.setattr(Simulated, "has_own_driver", False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)

    def check(self: Simulated, _: Submission, console: Console, **more: Any) -> None:
        here = len(process_executor.gpu_ids())
        for asked in (1, 2):
            if asked > here:
                console.note(f"{asked} of {here}")

    monkeypatch.setattr(Simulated, "check", check)
    console = Heard()
    made(store, tmp_path, {"seed": "0..1"}, max_parallel=2, console=console)
    assert console.notes == told


def test_there_are_no_more_parts_of_a_machine_than_trials(store, tmp_path, monkeypatch):
    asked: list[int] = []
    monkeypatch.setattr(
        controller, "part_of_machine", lambda _, __, num_slots: asked.append(num_slots) or nullcontext()
    )
    made(store, tmp_path, {"seed": "0..1"}, max_parallel=8)
    assert drive(store).state == "done"
    assert set(asked) == {2}


def test_a_sweep_is_not_made_where_its_trials_have_no_scratch(store, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(Simulated, "has_own_driver", False)
    with pytest.raises(SubmitError, match="scratch: cannot be written"):
        made(store, tmp_path, {"seed": [1]})
    assert not store.root.exists()


def test_an_id_that_is_taken_or_too_long_is_refused(store, tmp_path):
    made(store, tmp_path, {"seed": [1]})
    with pytest.raises(StoreError, match="exists already"):
        made(store, tmp_path, {"seed": [1]})
    text = load_pipeline_text(runs.read_pipeline(store, "s"), "p")
    asked = Submission("p", "", (), text, store.url, str(tmp_path), run_id="s" * 59)
    with pytest.raises(SubmitError, match="too long"):
        create(store, Simulated({}), asked, Quiet())


@given(st.integers(1, 40), st.integers(1, 9))
def test_parts_of_a_machine_are_apart_and_all_of_it(size, num_slots):
    parts = [slots.part(range(size), slot, num_slots) for slot in range(num_slots)]
    assert [item for one in parts for item in one] == list(range(size))
    sizes = [len(one) for one in parts]
    assert max(sizes) - min(sizes) <= 1


def test_a_slot_is_taken_for_as_long_as_something_is_started_in_it(monkeypatch):
    cpus = os.sched_getaffinity(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    here, whole = backends.load(backends.DEFAULT)({}), machine_memory_bytes()
    with slots.part_of_machine(here, 1, 2):
        inside = os.sched_getaffinity(0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
        assert machine_memory_bytes() == whole // 2
    assert inside < cpus or len(cpus) == 1
    assert os.sched_getaffinity(0) == cpus
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert machine_memory_bytes() == whole
    with slots.part_of_machine(Simulated({}), 1, 2):
        assert os.sched_getaffinity(0) == cpus
