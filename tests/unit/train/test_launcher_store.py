"""What a launcher says when the store goes away as it ends."""

from __future__ import annotations

import pytest
from kit import plans

from mlpipe._core.errors import NODE_FAULT_CODE, StoreError
from mlpipe.plan.plan import PreflightPlan
from mlpipe.store.outcome import read_outcome
from mlpipe.store.preflight import Checked, read_checked, write_checked
from mlpipe.train.launcher import Launcher
from mlpipe.train.outcome import Outcome, write_slow
from mlpipe.train.preflight.start import LOG, at_fault

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
        write_slow(tmp_path, named)
        launcher._ship_slow()
        assert read_checked(launcher.store, plan.attempt_key).slow == named

    def gone(*_):
        raise StoreError("gone", kind="infrastructure")

    monkeypatch.setattr(launcher.store, "put", gone)
    launcher._ship_slow()  # has nothing new to say
    write_slow(tmp_path, {})
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
