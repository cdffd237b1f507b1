"""What a launcher says when the store goes away as it ends."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace

import pytest
from kit import plans

from mlpipe._core.errors import NODE_FAULT_CODE, StoreError
from mlpipe.plan.gang_node import GangNode
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.outcome import read_outcome
from mlpipe.store.preflight import Checked, Ranked, read_checked, slow_replicas, write_checked
from mlpipe.train.launcher import Launcher
from mlpipe.train.outcome import Outcome
from mlpipe.train.preflight.start import LOG, at_fault
from mlpipe.train.slow_nodes import SlowNodes

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("until", ["events", "outcome", "preflight"])
def test_a_store_that_goes_away_after_a_preflight_changes_no_exit_code(tmp_path, monkeypatch, capsys, until):
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens", num_tokens=100))
    launcher = Launcher(plan, tmp_path / "plan.json", tmp_path)
    (tmp_path / LOG).write_text("its last words")
    kinds, gone = ["events", "outcome", "preflight"], StoreError("gone", kind="infrastructure")
    for method in ("put", "open_log"):
        wrapped = getattr(launcher.store, method)

        def call(key, *arguments, wrapped=wrapped, **keywords):
            kind = next(one for one in kinds if one in key.rpartition("/")[2])
            if kinds.index(kind) >= kinds.index(until):
                raise gone
            return wrapped(key, *arguments, **keywords)

        monkeypatch.setattr(launcher.store, method, call)
    assert launcher._end_before_ranks(at_fault(Checked(faults={"n0": ["slow"]}))) == NODE_FAULT_CODE
    first, last = capsys.readouterr().err.strip().splitlines()[0::2]
    assert "did not pass the preflight: n0: slow" in first
    assert last == "error: gone"
    kept = read_outcome(launcher.store, f"{plan.attempt_key}/outcome.json")
    assert (kept is not None) == (until == "preflight")


def test_nodes_that_rank_0_names_as_slow_are_in_the_store_and_a_store_that_is_away_ends_nothing(
    tmp_path, monkeypatch
):
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens", num_tokens=100))
    launcher = Launcher(plan, tmp_path / "plan.json", tmp_path)
    launcher._ship_slow()
    write_checked(launcher.store, plan.attempt_key, Checked())
    assert read_checked(launcher.store, plan.attempt_key).slow == {}
    for named in ({}, {"n1": 2.5}):
        SlowNodes(tmp_path).tell(named.items())
        launcher._ship_slow()
        assert read_checked(launcher.store, plan.attempt_key).slow == named

    def gone(*_):
        raise StoreError("gone", kind="infrastructure")

    replica = Launcher(plan, tmp_path / "plan.json", tmp_path)
    replica.node = replace(replica.node, replica=3)
    replica._ship_slow()
    assert slow_replicas(launcher.store, plan.attempt_key) == {3: ("n1", 2.5)}
    monkeypatch.setattr(launcher.store, "put", gone)
    launcher._ship_slow()  # has nothing new to say
    SlowNodes(tmp_path).tell([])
    SlowNodes(tmp_path / "gone").tell([("n2", 9.0)])  # as on a full disk: the training goes on
    launcher._ship_slow()


@pytest.mark.parametrize(("index", "spares", "signals"), [(1, 1, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)])
def test_a_machine_whose_own_preflight_fails_stands_by_where_the_others_may_have_a_spare(
    tmp_path, monkeypatch, index, spares, signals
):
    """Else the job would end as it does, though the others have done their work."""
    limits = PreflightPlan(0.5, 1.0, 1, 1.0, spares=spares)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(index))
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=100)
    plan = plans.train_plan(tmp_path / "store", tokens, launch={"num_nodes": 2, "preflight": limits})
    launcher = Launcher(plan, tmp_path / "plan.json", tmp_path)
    launcher.num_signals = signals
    failed = Outcome("failed", kind="infrastructure", message="killed at a matmul")
    monkeypatch.setattr("mlpipe.train.preflight.start.run_preflight", lambda *_, **__: failed)
    stands_by = (index, spares, signals) == (1, 1, 0)
    assert launcher._preflight() == (None if stands_by else failed)
    assert launcher.is_spare == stands_by


@pytest.mark.parametrize(
    ("place", "passed", "number"),
    [(1, None, 2), (2, None, 1), (3, None, 3), (2, [0, 2, 3, 4], 2), (4, [0, 2, 3, 4], 3)],
)
def test_machines_side_by_side_have_the_stages_of_one_pipeline(tmp_path, monkeypatch, place, passed, number):
    """Of two replicas of two stages the mesh numbers both replicas of a stage one after the other. Where
    there are spares, those that `passed` are counted, and nobody is numbered before."""
    limits = PreflightPlan(0.5, 1.0, 1, 1.0, spares=1) if passed else None
    launch = {"num_nodes": 4, "nproc_per_node": 1, "preflight": limits}
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=100)
    mesh = Mesh(pp=2, dp_replicate=2)
    plan = plans.train_plan(tmp_path / "store", tokens, mesh=mesh, launch=launch)
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(place))
    launcher = Launcher(plan, tmp_path / "plan.json", tmp_path)
    if passed:
        assert launcher.node.index == place
        found = (Checked(), Ranked(passed, "there:1"))
        monkeypatch.setattr("mlpipe.train.preflight.start.run_preflight", lambda *_, **__: found)
        assert launcher._preflight() is None
    assert launcher.node.index == number
    assert launcher._environment()["JOB_COMPLETION_INDEX"] == str(number)
    assert launcher.outcome_key.endswith(f"outcome-node-{number}.json")


@pytest.mark.parametrize(("first", "index", "number"), [(0, 0, 0), (0, 1, 2), (2, 0, 1), (2, 1, 3)])
def test_a_pipeline_is_on_machines_of_one_group(tmp_path, monkeypatch, first, index, number):
    """Which are counted from 0, and whose first one has a number in the gang: who asks for the place of a
    machine whose number is another one hears that."""
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=100)
    launch = {"num_nodes": 4, "nproc_per_node": 1}
    plan = plans.train_plan(tmp_path, tokens, mesh=Mesh(pp=2, dp_replicate=2), launch=launch)
    for name, value in (("MLPIPE_FIRST_NODE", first), ("JOB_COMPLETION_INDEX", index)):
        monkeypatch.setenv(name, str(value))
    for name, value in Launcher(plan, tmp_path / "plan.json", tmp_path)._environment().items():
        monkeypatch.setenv(name, value)
    assert GangNode.from_environment().index == number


@pytest.fixture
def handlers():
    """A launcher sets its own."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("when", ["before it listened", "while it fetched"])
def test_one_that_is_stopped_before_there_are_ranks_starts_none(tmp_path, monkeypatch, handlers, when):
    """Process 1 of a pod hears no signal that came before its handlers; the store has the word."""
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens", num_tokens=100))
    launcher = Launcher(replace(plan, inputs=("runs/r/stages/corpus",)), tmp_path / "plan.json", tmp_path)
    if when == "before it listened":
        launcher.store.put(f"runs/{plan.run_id}/cancel", b"ann asked for it")

    def fetch(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(300)

    monkeypatch.setattr("mlpipe.plan.process.outputs.fetch_output", fetch)
    assert launcher.run() == 5
    ended = read_outcome(launcher.store, f"{plan.attempt_key}/outcome.json")
    assert (ended.kind, ended.message) == ("cancelled", "stopped before its ranks began")
    assert signal.getsignal(signal.SIGTERM) == launcher._on_signal
