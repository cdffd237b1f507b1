"""What a node keeps of a failure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.store.folder import FolderStore
from mlpipe.train.launcher import RESTARTS_OF_A_GANG, Launcher
from mlpipe.train.outcome import Outcome

pytestmark = pytest.mark.unit


def test_stacks_and_flight_recordings_are_kept(tmp_path: Path) -> None:
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
    plan = replace(plan, store_url=str(tmp_path / "store"))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    kept = {"flight-rank-1": b"\x80\x04pickle", "stacks-rank-0.txt": b"stacks", "fatal-1.json": b"{}"}
    for name, content in {**kept, "tokens.bin": b"not of interest", "torchrun.log": b"words"}.items():
        (scratch / name).write_bytes(content)
    launcher = Launcher(plan, tmp_path / "plan.json", scratch)
    launcher.keep_postmortem(scratch / "torchrun.log")
    store, folder = FolderStore(tmp_path / "store"), f"{plan.attempt_key}/postmortem"
    found = {info.key.rpartition("/")[2]: store.get(info.key) for info in store.list(folder)}
    assert found == {**kept, "torchrun.log": b"words"}


def test_one_restart_of_the_gang_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though torchrun has any number of rounds in each, and they have numbers of their own: a node that is
    cut off and comes back begins one, too, which `max_restarts` does not bound."""
    monkeypatch.setenv("MLPIPE_GANG_RESTART", "1")
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
    launcher = Launcher(replace(plan, store_url=str(tmp_path)), tmp_path / "plan.json", tmp_path / "scratch")
    assert launcher.first_restart == RESTARTS_OF_A_GANG > 100 * plan.launch.max_restarts
    launcher._store_outcome(Outcome("done"), 0, 0)
    assert json.loads(FolderStore(tmp_path).get(launcher.outcome_key))["restarts"] == 1
