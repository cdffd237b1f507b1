"""How stages are stopped: at their timeout, by a request, by a second signal; on a clock of the tests. And
what a driver tells of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.clock import Clock

from mlpipe._core.errors import MlpipeError, PlanError, StoreError, SubmitError
from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.plan.plan import Launch, Plan
from mlpipe.store import leases, runs, wanted
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState
from mlpipe.submit.dag_runner import DagRunner, Drive
from mlpipe.submit.executor import Ended, Slots, StopRequest

pytestmark = pytest.mark.unit
TIMEOUT, SHUTDOWN = 100.0, 10.0


def command_plan(name: str, attempt: int) -> Plan:
    launch = Launch(1, 1, 0, "cpu", (), {}, TIMEOUT, SHUTDOWN, None)
    return Plan(1, "run", "test", name, attempt, "store", "digest", "digest", launch, CommandPlan(("true",)))


class Stage:
    """One that runs until it is told to stop. `hears`: how it ends then; None: not at all. `dies`: of a kill.
    `lost`: its node is, as soon as it is told."""

    def __init__(self, clock: Clock, *, hears: Any = None, dies: bool = True, lost: bool = False) -> None:
        self.clock, self.hears, self.dies, self.lost = clock, hears, dies, lost
        self.told: list[tuple[str, float]] = []
        self.ended: Ended | None = None
        self.says = ""

    def poll(self) -> Ended | None:
        return self.ended

    def note(self) -> str:
        return self.says

    def terminate(self) -> None:
        self.told.append(("terminate", self.clock.now))
        if self.hears is not None:
            self.ended = Ended(self.hears, "saved at step 7", lost=self.lost)

    def kill(self) -> None:
        self.told.append(("kill", self.clock.now))
        if self.dies:
            self.ended = Ended("cancelled", "it was killed")


class World:
    """A run of stage `a`, and what starts it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.stop = Clock(), StopRequest()
        monkeypatch.setattr("mlpipe.submit.dag_runner.time", self.clock)
        self.store, self.scratch = open_store(str(folder / "store")), folder / "scratch"
        runs.create_run(self.store, "run", "", "digest", ["a"], "local", {})
        leases.take_lease(self.store, "run", "me", 3000)
        self.began = self.clock.now
        self.stages: Iterator[Stage] = iter(())
        self.make_plan: Callable[[str, int], Plan] = command_plan
        self.found: list[list[Path]] = []  # in the folder of each stage, as it started

    def walk(
        self, *stages: Stage, watch: Callable[[RunState], None] = lambda state: None, outlives: bool = False
    ) -> RunState:
        self.stages = iter(stages)
        runs.update_run(self.store, "run", lambda run: replace(run, state="running"))
        drive = Drive(self.store, "run", "me", self.scratch, self.stop, watch=watch, outlives_driver=outlives)
        return DagRunner(drive, {"a": ()}, self.make_plan, self).run()

    def adopted(self, stage: Stage, *, after: float, **more: Any) -> RunState:
        """As the driver before us left it so many seconds after its start."""
        self.plan = command_plan("a", 1)
        key = f"{self.plan.attempt_key}/plan.json"
        if not self.store.exists(key):
            self.store.put(key, self.plan.to_json().encode())
        left = runs.StageState("running", 1, started=self.clock.now - after)
        runs.update_run(self.store, "run", lambda run: replace(run, state="running", stages={"a": left}))
        return self.walk(stage, **more)

    # An executor

    def capacity(self) -> Slots:
        return Slots(cpus=1, gpus=0)

    def check(self, plan: Plan) -> None:
        assert plan.stage == "a"

    def start(self, plan: Plan, scratch: Path) -> Stage:
        self.found.append(list(scratch.iterdir()))
        return next(self.stages)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_at_its_timeout_a_stage_is_asked_and_when_it_does_not_hear_killed(world: World) -> None:
    deaf = Stage(world.clock)
    state = world.walk(deaf).stages["a"]
    (first, asked), (second, killed) = deaf.told
    assert (first, second) == ("terminate", "kill")
    assert asked - world.began == pytest.approx(TIMEOUT, abs=1)
    assert killed - asked == pytest.approx(SHUTDOWN, abs=1)
    assert (state.state, state.outcome["kind"]) == ("failed", "failed")
    assert state.message == "ran longer than its timeout of 100 s; it was killed"


def test_one_that_is_done_when_it_is_asked_is_done(world: World) -> None:
    state = world.walk(Stage(world.clock, hears="done"))
    assert (state.state, state.stages["a"].message) == ("done", "saved at step 7")


def test_one_whose_end_nobody_sees_is_given_up(world: World) -> None:
    state = world.walk(gone := Stage(world.clock, dies=False))
    assert state.stages["a"].message.endswith("killed, and its end was not seen")
    assert 10 < world.clock.now - gone.told[-1][1] < 20


def test_a_timeout_counts_from_the_start_whichever_driver_looks(world: World) -> None:
    adopted = Stage(world.clock, hears="cancelled")
    assert world.adopted(adopted, after=TIMEOUT - 5).state == "failed"
    assert adopted.told[0][1] - world.began == pytest.approx(5, abs=1)
    assert list(world.scratch.iterdir()) == []


def test_a_stage_whose_stored_plan_was_changed_is_not_adopted_and_goes_on(world: World) -> None:
    changed = replace(command_plan("a", 1), work=CommandPlan(("false",)))
    world.store.put(f"{changed.attempt_key}/plan.json", changed.to_json().encode())
    stage = Stage(world.clock)
    with pytest.raises(SubmitError, match="argv"):
        world.adopted(stage, after=1.0, outlives=True)
    assert stage.told == []


def test_a_request_to_cancel_is_heard_once_the_store_is_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([StoreError("away", kind="infrastructure"), None, "by hand"])

    def request(store: Any, run_id: str) -> str | None:
        assert run_id == "run"
        answer = next(asked)
        if isinstance(answer, StoreError):
            raise answer
        return answer

    monkeypatch.setattr("mlpipe.submit.dag_runner.runs.cancel_requested", request)
    said = set()
    stage = Stage(world.clock, hears="cancelled")
    state = world.walk(stage, watch=lambda state: said.add(state.stages["a"].message))
    assert (state.state, state.message, world.stop.kind) == ("cancelled", "by hand", "cancelled")
    assert said == {"", "saved at step 7"}
    assert [word for word, _ in stage.told] == ["terminate"]
    assert 2 <= stage.told[0][1] - world.began < 10  # a look a second


@pytest.mark.parametrize("is_stopping", [True, False])
def test_a_second_signal_kills_unless_the_next_driver_is_to_find_it(world: World, is_stopping: bool) -> None:
    stage = Stage(world.clock)

    def watch(state: RunState) -> None:
        if not stage.told and is_stopping:
            world.stop.request("cancelled", "Ctrl-C")
        elif world.clock.now < world.began + 50:  # not when it says how it ended
            world.clock.now += 50
            raise KeyboardInterrupt

    world.walk(stage, watch=watch, outlives=True)
    assert [word for word, _ in stage.told] == (["terminate", "kill"] if is_stopping else [])
    state = runs.read_run(world.store, "run").stages["a"].state
    assert state == ("cancelled" if is_stopping else "running")


def test_a_node_that_is_lost_while_the_run_stops_is_not_replaced(world: World) -> None:
    stage = Stage(world.clock, hears="failed", lost=True)
    state = world.walk(stage, watch=lambda state: world.stop.request("cancelled", "by hand"))
    assert (state.stages["a"].state, state.stages["a"].attempt) == ("failed", 1)


def test_a_stage_that_loses_one_node_after_the_other_is_given_up(world: World) -> None:
    def lost() -> Stage:
        stage = Stage(world.clock)
        stage.ended = Ended("failed", "node-1 was lost", kind="infrastructure", lost=True)
        return stage

    state = world.walk(*(lost() for _ in range(30))).stages["a"]
    assert (state.state, state.attempt, state.message) == ("failed", 20, "node-1 was lost")


def test_a_second_signal_does_not_wait_for_what_cannot_be_killed(world: World) -> None:
    stage, signals = Stage(world.clock, dies=False), iter([KeyboardInterrupt])

    def watch(state: RunState) -> None:
        for signal in signals:
            raise signal

    state = world.walk(stage, watch=watch).stages["a"]
    assert (state.state, state.message) == ("cancelled", "killed")
    assert world.clock.now - stage.told[-1][1] == pytest.approx(10, abs=1)


def test_a_stage_that_somebody_else_stopped_stops_its_run(world: World) -> None:
    stage = Stage(world.clock)
    stage.ended = Ended("cancelled", "by scancel")
    state = world.walk(stage)
    assert (state.state, state.message) == ("cancelled", "stage 'a' was stopped: by scancel")
    assert world.stop.kind == "cancelled"


def test_a_driver_that_ends_has_heard_who_asked_last(world: World) -> None:
    """However short ago it looked; who asks later finds no driver, and starts one."""
    stage, asks = Stage(world.clock), iter(["a"])
    stage.ended = Ended("done")

    def watch(state: RunState) -> None:
        shutil.rmtree(world.scratch, ignore_errors=True)  # as who tidies machines does
        if state.stages["a"].state == "done":
            for name in asks:
                wanted.ask(world.store, "run", name)

    assert world.walk(stage, watch=watch).state == "done"
    assert wanted.asked(world.store, "run") == []


def test_what_is_told_of_a_stage_is_of_its_latest_attempt(world: World) -> None:
    """While it waits, while it runs, and how it ended."""
    earlier = runs.StageState("pending", 1, "failed", 1.0, 2.0, 3, {"kind": "failed"})
    runs.update_run(world.store, "run", lambda run: replace(run, stages={"a": earlier}))
    (world.scratch / "a-2" / "left").mkdir(parents=True)
    plan = command_plan("a", 2)
    plan = replace(plan, launch=plan.launch._replace(avoid=("n1", "n2")))
    world.make_plan = lambda name, attempt: plan
    stage, seen = Stage(world.clock), []

    def watch(state: RunState) -> None:
        seen.append(state.stages["a"])
        stage.says = "waits for a node" if len(seen) == 1 else ""
        if len(seen) == 3:
            stage.ended = Ended("done", "7 files", exit_code=0, outcome={"digest": "d"})

    ended = world.walk(stage, watch=watch).stages["a"]
    assert seen[0] == runs.StageState("running", 2, started=world.began)
    assert seen[1] == replace(seen[0], message="waits for a node")
    avoids = "leaves out n1, n2, which in an earlier attempt did not pass the preflight or got slow"
    assert seen[2] == replace(seen[0], message=avoids)
    outcome = {"digest": "d", "kind": None}
    assert ended == runs.StageState("done", 2, "7 files", world.began, ended.ended, 0, outcome)
    assert ended.ended == pytest.approx(world.began + 0.3)
    assert (world.found, list(world.scratch.iterdir())) == ([[]], [])
    assert world.store.get(f"{plan.attempt_key}/plan.json") == plan.to_json().encode()
    assert b'"submitted"' in world.store.read_log(f"{plan.attempt_key}/events.jsonl")[0]


@pytest.mark.parametrize("where", ["make_plan", "check"])
def test_a_stage_that_cannot_start_fails_with_the_reason(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise SubmitError("there is no such GPU", kind="input")

    monkeypatch.setattr(world, where, refuse)
    world.scratch.mkdir()
    if where == "check":
        (world.scratch / "a-1").mkdir()
    state = world.walk().stages["a"]
    words, outcome = "there is no such GPU", {"kind": "input"}
    assert state == runs.StageState("failed", 1, words, ended=world.began, outcome=outcome)
    assert list(world.scratch.iterdir()) == []


@pytest.mark.parametrize("error", [PlanError, SubmitError])
def test_a_stage_that_lost_the_last_that_it_could_run_on_says_so(
    world: World, error: type[MlpipeError]
) -> None:
    def make_plan(name: str, attempt: int) -> Plan:
        if attempt == 2:
            raise error("no such GPU is left", kind="input")
        return command_plan(name, attempt)

    world.make_plan, stage = make_plan, Stage(world.clock)
    stage.ended = Ended("failed", "node-1 was lost", kind="infrastructure", lost=True)
    state = world.walk(stage).stages["a"]
    assert (state.state, state.attempt) == ("failed", 1)
    assert (state.message, state.outcome["kind"]) == ("node-1 was lost; no such GPU is left", "input")
