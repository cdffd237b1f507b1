"""The walk over any DAG, with a backend that ends stages in any order: what starts when, what is skipped."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import saver
from kit.rendered import pipeline_of

from mlpipe._core.errors import DamagedError
from mlpipe.cli.session import CliSession
from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.kinds.promote import driver as promotion
from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.plan.plan import Launch, Plan
from mlpipe.store import catalogue, leases, outputs, registry, runs, wanted
from mlpipe.store.base import Store
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit.adopt import DriveRequest
from mlpipe.submit.dag_runner import DagRunner, Drive
from mlpipe.submit.executor import Ended, Slots, StopRequest
from mlpipe.submit.handle import InDriver
from mlpipe.submit.local import LocalBackend

pytestmark = pytest.mark.unit


def command_plan(name: str, attempt: int, timeout: float | None = None) -> Plan:
    launch = Launch(
        num_nodes=1,
        nproc_per_node=1,
        max_restarts=0,
        device="cpu",
        argv=(),
        env={},
        timeout_seconds=timeout,
        shutdown_seconds=10.0,
        metrics_port=None,
    )
    return Plan(1, "run", "test", name, attempt, "store", "digest", "digest", launch, CommandPlan(("true",)))


class Scripted:
    """Each stage ends as told after as many looks as told; a terminated one ends as cancelled."""

    def __init__(self, walk_state, needs, fails, looks, cpus: int) -> None:
        self.state, self.needs, self.fails, self.looks, self.cpus = walk_state, needs, fails, looks, cpus
        self.alive: set[str] = set()
        self.started: list[str] = []
        self.most = 0

    def capacity(self) -> Slots:
        return Slots(cpus=self.cpus, gpus=0)

    def check(self, plan: Plan) -> None:
        pass

    def start(self, plan: Plan, scratch: Path):
        states = self.state().stages
        assert all(states[need].state == "done" for need in self.needs[plan.stage])
        assert states[plan.stage].state == "running"
        self.started.append(plan.stage)
        self.alive.add(plan.stage)
        self.most = max(self.most, len(self.alive))
        return ScriptedHandle(self, plan.stage)


class ScriptedHandle:
    def __init__(self, backend: Scripted, name: str) -> None:
        self.backend, self.name, self.looks = backend, name, backend.looks[name]
        self.ended: Ended | None = None

    def poll(self) -> Ended | None:
        self.looks -= 1
        if self.ended is None and self.looks <= 0:
            self._end("failed" if self.name in self.backend.fails else "done")
        return self.ended

    def note(self) -> str:
        return ""

    def _end(self, state) -> None:
        self.backend.alive.discard(self.name)
        self.ended = Ended(state, kind="failed" if state == "failed" else None)

    def terminate(self) -> None:
        self._end("cancelled")

    def kill(self) -> None:
        self._end("cancelled")


@st.composite
def dags(draw):
    count = draw(st.integers(1, 7))
    names = [f"s{i}" for i in range(count)]
    needs = {
        name: tuple(draw(st.lists(st.sampled_from(names[:i]), unique=True)) if i else ())
        for i, name in enumerate(names)
    }
    shuffled = draw(st.permutations(names))  # the order in the file is not the order of the needs
    return {name: needs[name] for name in shuffled}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("mlpipe.submit.dag_runner._POLL_SECONDS", 0.0)
    monkeypatch.setattr("mlpipe.submit.wanted._LOOK_SECONDS", 0.0)


def walk(needs, fails, looks, cpus, *, stop=None, stop_after=None, make_plan=command_plan):
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", list(needs), "local", {})
        leases.take_lease(store, "run", "me", 1000.0)
        runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
        stop = stop or StopRequest()
        ticks = itertools.count()

        def watch(state):
            if stop_after is not None and next(ticks) == stop_after:
                stop.request("cancelled", "asked to")

        backend = Scripted(lambda: walker.state, needs, fails, looks, cpus)
        drive = Drive(store, "run", "me", Path(folder) / "scratch", stop, watch=watch)
        walker = DagRunner(drive, needs, make_plan, backend)
        state = walker.run()
        assert state == runs.read_run(store, "run")
        assert not backend.alive
        return state, backend


class Cluster(Scripted):
    """Its stages go on without a driver; starting one that is there adopts it."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.handles: dict[tuple[str, int], ScriptedHandle] = {}

    def start(self, plan: Plan, scratch: Path):
        key = (plan.stage, plan.attempt)
        if key not in self.handles:
            self.handles[key] = super().start(plan, scratch)
        return self.handles[key]


@settings(max_examples=15, deadline=None)
@given(dags(), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=5), st.data())
def test_drivers_that_die_or_let_go_at_any_moment_repeat_nothing(needs, ends, data):
    looks = {name: data.draw(st.integers(1, 4)) for name in needs}

    class Died(Exception):
        pass

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", list(needs), "kubernetes", {})
        runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
        backend = Cluster(lambda: runs.read_run(store, "run"), needs, set(), looks, 2)
        for driver, (after, dies) in enumerate([*ends, (10**6, False)]):
            leases.take_lease(store, "run", f"driver {driver}", 1000.0)
            stop, ticks = StopRequest(), itertools.count()

            def watch(state, stop=stop, ticks=ticks, after=after, dies=dies):
                if next(ticks) == after:
                    if dies:
                        raise Died
                    stop.request("detached", "evicted")

            scratch, holder = Path(folder) / "scratch", f"driver {driver}"
            drive = Drive(store, "run", holder, scratch, stop, watch=watch, outlives_driver=True)
            walker = DagRunner(drive, needs, command_plan, backend)
            with contextlib.suppress(Died):
                walker.run()
            leases.release_lease(store, "run", f"driver {driver}")
        state = runs.read_run(store, "run")
        assert state.state == "done"
        assert {stage.attempt for stage in state.stages.values()} == {1}
        assert sorted(backend.started) == sorted(needs)


@settings(max_examples=12, deadline=None)
@given(dags(), st.data())
def test_stages_that_are_asked_for_one_by_one_run_once_whichever_driver_hears_it(needs, data):
    """Followers as `submit --stage` has them: each asks when its needs are done, some looks later, and starts
    a driver where there is none. Drivers die, or end when they know of nothing more."""
    looks = {name: data.draw(st.integers(1, 4)) for name in needs}
    delays = {name: data.draw(st.integers(0, 5)) for name in needs}
    deaths = data.draw(st.lists(st.integers(0, 6), max_size=3))
    asked: list[str] = []

    class Died(Exception):
        pass

    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", list(needs), "kubernetes", {})
        runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
        backend = Cluster(lambda: runs.read_run(store, "run"), needs, set(), looks, 8)

        def follow(state):
            for name in needs:
                if name not in asked and all(state.stages[need].state == "done" for need in needs[name]):
                    delays[name] -= 1
                    if delays[name] < 0:
                        asked.append(name)
                        wanted.ask(store, "run", name)

        for driver in itertools.count():
            assert driver < 100
            run = runs.read_run(store, "run")
            if run.state == "done":
                break
            follow(run)
            leases.take_lease(store, "run", f"driver {driver}", 1000.0)
            ticks, dies_at = itertools.count(), deaths.pop() if deaths else -1

            def watch(state, ticks=ticks, dies_at=dies_at):
                follow(state)
                if next(ticks) == dies_at:
                    raise Died

            scratch, holder = Path(folder) / "scratch", f"driver {driver}"
            drive = Drive(store, "run", holder, scratch, StopRequest(), watch=watch, outlives_driver=True)
            with contextlib.suppress(Died):
                DagRunner(drive, needs, command_plan, backend).run(only_wanted=True)
            leases.release_lease(store, "run", f"driver {driver}")
        assert sorted(backend.started) == sorted(needs) == sorted(asked)
        assert {stage.attempt for stage in run.stages.values()} == {1}
        assert wanted.asked(store, "run") == []


def test_what_is_asked_for_joins_the_walk_and_a_failed_stage_runs_again():
    needs = {"a": (), "b": (), "c": ()}
    told: dict[int, list[str]] = {1: ["b"], 3: ["a"], 20: ["a"]}
    ticks = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", list(needs), "local", {})
        leases.take_lease(store, "run", "me", 1000.0)
        runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
        looks = {"a": 10, "b": 40, "c": 1}
        backend = Scripted(lambda: runs.read_run(store, "run"), needs, {"a"}, looks, 8)

        def watch(state):
            for name in told.get(next(ticks), ()):
                wanted.ask(store, "run", name)

        wanted.ask(store, "run", "a")
        scratch = Path(folder) / "scratch"
        drive = Drive(store, "run", "me", scratch, StopRequest(), watch=watch)
        walker = DagRunner(drive, needs, command_plan, backend)
        state = walker.run(only_wanted=True)
        assert backend.started == ["a", "b", "a"]  # asked for while it ran: adopted; after it failed: again
        assert backend.most == 2
        assert {name: stage.state for name, stage in state.stages.items()} == {
            "a": "failed", "b": "done", "c": "pending"
        }  # fmt: skip
        assert state.state == "failed"
        assert wanted.asked(store, "run") == []


def test_who_asks_and_leaves_makes_sure_that_a_driver_hears(monkeypatch: pytest.MonkeyPatch):
    started: list[bool] = []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", ["a"], "local", {})
        leases.take_lease(store, "run", "me", 1000.0)
        wanted.ask(store, "run", "a")
        monkeypatch.setattr(  # the driver looked for the last time before that
            "mlpipe.submit.adopt.time.sleep", lambda _: leases.release_lease(store, "run", "me")
        )
        monkeypatch.setattr(DriveRequest, "start_driver", lambda request: started.append(True))
        request = DriveRequest(LocalBackend({}), store, "run", pipeline_of("quickstart"), "a", CliSession())
        request.await_heard()
        assert started == [True]
        wanted.take(store, "run", ["a"])
        request.await_heard()
        assert started == [True]


def test_a_cancelled_run_forgets_what_was_asked_for():
    needs = {"a": (), "b": ("a",)}
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(folder)
        runs.create_run(store, "run", "", "digest", list(needs), "local", {})
        leases.take_lease(store, "run", "me", 1000.0)
        runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
        backend = Scripted(lambda: runs.read_run(store, "run"), needs, set(), {"a": 5, "b": 1}, 8)
        stop = StopRequest()

        def watch(state):
            if stop.kind is None:
                wanted.ask(store, "run", "b")
                stop.request("cancelled", "asked to")

        wanted.ask(store, "run", "a")
        scratch = Path(folder) / "scratch"
        walker = DagRunner(
            Drive(store, "run", "me", scratch, stop, watch=watch), needs, command_plan, backend
        )
        assert walker.run(only_wanted=True).state == "cancelled"
        assert backend.started == ["a"]
        assert wanted.asked(store, "run") == []


def walk_losing(folder: Path, lose) -> tuple[Store, RunState]:
    """Of one stage on a cluster: `lose(store, plan, scratch)` says whether its node is lost with it."""

    class Losing(Cluster):
        def start(self, plan: Plan, scratch: Path):
            handle = super().start(plan, scratch)
            if lose(store, plan, scratch):
                handle.ended = Ended("failed", "node-1 was lost", kind="infrastructure", lost=True)
            return handle

    store, needs, scratch = open_store(str(folder / "store")), {"a": ()}, folder / "scratch"
    runs.create_run(store, "run", "", "digest", ["a"], "kubernetes", {})
    leases.take_lease(store, "run", "me", 1000.0)
    runs.update_run(store, "run", lambda run: runs.replace(run, state="running"))
    backend = Losing(lambda: runs.read_run(store, "run"), needs, set(), {"a": 1}, 2)
    drive = Drive(store, "run", "me", scratch, StopRequest(), outlives_driver=True)
    walker = DagRunner(drive, needs, command_plan, backend)
    return store, walker.run()


def test_a_lost_attempt_is_fenced_and_the_next_one_goes_on(tmp_path):
    store, state = walk_losing(tmp_path, lambda store, plan, scratch: plan.attempt < 3)
    assert (state.state, state.stages["a"].attempt) == ("done", 3)
    fences = [info.key.rpartition("/")[2] for info in store.list("runs/run/stages/a/checkpoints")]
    assert fences == ["fence-1-0", "fence-2-0"]
    fences = [info.key.rpartition("/")[2] for info in store.list("runs/run/stages/a/outputs")]
    assert fences == ["fence-1", "fence-2"]


def test_an_attempt_that_is_lost_after_its_commit_is_done(tmp_path):
    digests = []

    def lose(store, plan: Plan, scratch: Path) -> bool:
        (scratch / "output").mkdir()
        digests.append(outputs.commit_output(store, plan.stage_key, scratch / "output", plan.attempt))
        return True

    _, state = walk_losing(tmp_path, lose)
    stage = state.stages["a"]
    assert (stage.state, stage.attempt, stage.exit_code) == ("done", 1, 0)
    assert [stage.outcome["digest"]] == digests


@settings(max_examples=25, deadline=None)
@given(dags(), st.data())
def test_every_stage_runs_when_its_needs_are_done_and_failures_skip_only_what_needs_them(needs, data):
    fails = data.draw(st.sets(st.sampled_from(list(needs)), max_size=2))
    looks = {name: data.draw(st.integers(1, 4)) for name in needs}
    cpus = data.draw(st.integers(1, 3))
    state, backend = walk(needs, fails, looks, cpus)

    def spoiled(name):
        return any(need in fails or spoiled(need) for need in needs[name])

    for name in needs:
        expected = "skipped" if spoiled(name) else "failed" if name in fails else "done"
        assert state.stages[name].state == expected
        assert (name in backend.started) == (expected != "skipped")
        assert state.stages[name].attempt == (expected != "skipped")
    assert len(backend.started) == len(set(backend.started))
    assert backend.most <= cpus
    assert state.state == ("failed" if fails & set(backend.started) else "done")


@settings(max_examples=15, deadline=None)
@given(dags(), st.integers(0, 6))
def test_a_stop_at_any_moment_ends_what_runs_and_starts_nothing_more(needs, stop_after):
    state, backend = walk(needs, set(), dict.fromkeys(needs, 2), 2, stop_after=stop_after)
    ended = {stage.state for stage in state.stages.values()}
    assert ended <= {"done", "cancelled", "pending", "skipped"}
    assert state.state == ("done" if ended == {"done"} else "cancelled")
    assert {name for name, stage in state.stages.items() if stage.attempt} == set(backend.started)


def test_independent_stages_run_side_by_side_when_there_is_room():
    needs = {"a": (), "b": (), "c": ()}
    assert walk(needs, set(), dict.fromkeys(needs, 3), 2)[1].most == 2
    assert walk(needs, set(), dict.fromkeys(needs, 3), 8)[1].most == 3
    assert walk(needs, set(), dict.fromkeys(needs, 3), 1)[1].most == 1
    state, backend = walk(needs, set(), dict.fromkeys(needs, 3), 0)  # each asks for more than there is: alone
    assert (state.state, backend.most) == ("done", 1)
    planned = []
    walk(
        needs,
        set(),
        dict.fromkeys(needs, 9),
        1,
        make_plan=lambda *of: (planned.append(of), command_plan(*of))[1],
    )
    assert planned == [("a", 1), ("b", 1), ("c", 1)]  # not again while one waits for room


def promote_plan(store: Store, attempt: int) -> Plan:
    plan = command_plan("promote", attempt)
    return replace(plan, run_id="r", store_url=store.url, work=PromotePlan("train", None, "lm", "best"))


@pytest.mark.parametrize(
    "died",
    ["never", "before the version", "after the version", "after the alias", "in an attempt before"],
)
def test_the_driver_promotes_by_itself_and_once(tmp_path: Path, died: str) -> None:
    """No executor starts anything, wherever the driver before it died."""
    store = open_store(str(tmp_path))
    needs: dict[str, tuple[str, ...]] = {"train": (), "promote": ("train",)}
    runs.create_run(store, "r", "", "digest", list(needs), "kubernetes", {})
    leases.take_lease(store, "r", "me", 1000.0)
    prefix = saver.save(store, 7)
    promote = StageState() if died == "never" else StageState("running", 1, started=1.0)
    stages = {"train": StageState("done", 1), "promote": promote}
    runs.update_run(store, "r", lambda run: replace(run, state="running", stages=stages))
    plan = promote_plan(store, 1)
    store.put(f"{plan.attempt_key}/plan.json", plan.to_json().encode())
    if died.startswith(("after", "in")):
        alias = "best" if died == "after the alias" else None
        registry.promote(store, "lm", alias, prefix, {"attempt": plan.attempt_key})
    if died == "in an attempt before":  # on this machine, where a resume begins another
        runs.reopen(store, "r")
    executor = Scripted(lambda: runner.state, needs, set(), {}, cpus=0)
    drive = Drive(store, "r", "me", tmp_path / "scratch", StopRequest())
    runner = DagRunner(drive, needs, lambda name, attempt: promote_plan(store, attempt), executor)
    stage = runner.run().stages["promote"]
    assert stage.state == "done"
    assert stage.outcome["version"] == 1
    assert [model.version for model in registry.list_models(store)[0]] == [1]
    assert registry.show_model(store, "lm", "best").step == 7


def test_a_late_attempt_looks_through_the_versions_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its number: each look reads the manifest of each version. What is damaged is not promoted."""
    store = open_store(str(tmp_path))
    runs.create_run(store, "r", "", "digest", ["train", "promote"], "kubernetes", {})
    prefix = saver.save(store, 7)
    for other in range(3):
        registry.promote(store, "lm", None, prefix, {"attempt": f"of another {other}"})
    store.put(f"{prefix}/model-0", saver.expected(8, "model-0"))
    with pytest.raises(DamagedError, match=r"block 0 is corrupt(.|\n)*mlpipe checkpoints discard r 7, then"):
        promotion.run(store, promote_plan(store, 5), lambda: None)
    store.put(f"{prefix}/model-0", saver.expected(7, "model-0"))
    looks, find = [], registry.find_version

    def counted(*of: Any, **more: Any) -> Any:
        looks.append(of)
        return find(*of, **more)

    monkeypatch.setattr(registry, "find_version", counted)
    assert promotion.run(store, promote_plan(store, 5), lambda: None)["version"] == 4
    assert len(looks) == 1


@pytest.mark.parametrize("block", [1, 7])  # of 7
def test_a_promotion_that_is_stopped_while_it_reads_registers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """It reads no further block, and the alias stays where it was."""
    store = open_store(str(tmp_path))
    runs.create_run(store, "r", "", "digest", ["train", "promote"], "kubernetes", {})
    registry.promote(store, "lm", "best", saver.save(store, 7), {})
    saver.save(store, 8)
    before, reads, read = list(store.list("models")), [], catalogue.read_blob
    reached, stopped, ended = threading.Event(), threading.Event(), threading.Event()

    def held(*of: Any) -> None:
        reads.append(of)
        if len(reads) == block:
            reached.set()
            assert stopped.wait(30)
        read(*of)

    class Followed(InDriver):
        def _follow(self) -> None:
            super()._follow()
            ended.set()

    monkeypatch.setattr(catalogue, "read_blob", held)
    handle = Followed(store, promote_plan(store, 1))
    assert reached.wait(30)
    handle.terminate()
    stopped.set()
    assert ended.wait(30)
    assert handle.poll() == Ended("cancelled", "stopped before it was done")
    assert (len(reads), list(store.list("models"))) == (block, before)


def test_a_damaged_checkpoint_that_is_promoted_by_hand_is_promoted_by_hand_again(tmp_path: Path) -> None:
    """The run is done: its resume would train nothing."""
    store = open_store(str(tmp_path))
    runs.create_run(store, "r", "", "digest", ["train"], "process", {})
    store.put(f"{saver.save(store, 7)}/model-0", saver.expected(8, "model-0"))
    for alias, told in (("best", " --alias best"), (None, "")):
        with pytest.raises(DamagedError) as caught:
            promotion.promote(store, "r", PromotePlan("train", None, "lm", alias))
        again = f"mlpipe models promote r --as lm{told} --stage train"
        assert caught.value.hint == f"mlpipe checkpoints discard r 7, then {again}"


def test_what_needs_a_skipped_stage_is_skipped():
    """And waits for nothing: it stands before the others in the file."""
    needs = {"c": ("b",), "b": ("a",), "a": ()}
    state, _ = walk(needs, {"a"}, dict.fromkeys(needs, 1), 2)
    assert {name: stage.state for name, stage in state.stages.items()} == {
        "a": "failed", "b": "skipped", "c": "skipped"
    }  # fmt: skip
    assert [state.stages[name].message for name in "bc"] == [
        f"needs {need!r}, which did not finish" for need in "ab"
    ]
