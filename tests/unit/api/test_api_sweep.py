"""Sweeps from Python, over trials that train nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit import sweep_backend
from kit.sweep_backend import Simulated

import mlpipe
from mlpipe._core.errors import SubmitError, TrainError
from mlpipe.submit import backends
from mlpipe.submit.sweeps import controller

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLPIPE_STORE", raising=False)
    monkeypatch.setitem(backends.TABLE, sweep_backend.NAME, sweep_backend.TARGET)
    monkeypatch.setattr(controller, "_LOOK_SECONDS", (0.005, 0.005))
    Simulated.reset()
    return tmp_path


def pipeline(folder: Path, *args: dict[str, Any]) -> mlpipe.LoadedPipeline:
    model = {"entry": "a.b:c", "args": {}}
    train = {"model": model, "data": {"entry": "a.b:d", "batch_size": 8}, "steps": 3}
    sweep = {"over": {"model.args": list(args)}, "metric": {"name": "loss"}, "max_parallel": 2}
    spec = {"version": 1, "name": "swept", "stages": [{"name": "fit", "train": train}], "sweep": sweep}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    return mlpipe.load("pipeline.yaml")


def test_a_sweep_is_run_looked_at_and_found_again(folder, capsys):
    asked = pipeline(folder, {"floor": 0.3}, {"fails": True}, {"floor": 0.1})
    with pytest.raises(SubmitError, match="has a sweep") as caught:
        mlpipe.run(asked)
    assert "mlpipe.sweep(pipeline)" in str(caught.value.hint)
    found = mlpipe.sweep(asked, "simulated", sweep_id="s")
    assert (found.id, found.status, found.wait(timeout=0)) == ("s", "done", "done")
    assert [run.id for run in found.trials] == ["s-000", "s-001", "s-002"]
    assert found.best is not None
    assert found.best.id == "s-002"
    assert len(found.best.metrics()) == 3
    rows = found.table()
    assert rows.column("trial") == ["002", "000", "001"]
    assert rows.column("state") == ["done", "done", "failed"]
    assert rows[0]["args"] == {"floor": 0.1}
    assert rows[0]["loss"] == pytest.approx(0.1 + (1 + 1 / 2 + 1 / 3) / 3)
    told = capsys.readouterr()
    assert told.out == ""
    assert 'args={"floor": 0.1}  done' in told.err
    assert (folder / "runs/s/report.html").exists() or "report" not in told.err
    # the same again goes on, and there is nothing left
    assert mlpipe.sweep(asked, "simulated", sweep_id="s", quiet=True).table() == rows
    assert capsys.readouterr().err == ""
    assert mlpipe.Sweep("s").resume(quiet=True).table() == rows
    assert set(Simulated.started.values()) == {1}
    for wrong, says in (
        (lambda: mlpipe.Sweep("s-000"), "is one run"),
        (mlpipe.Run("s").resume, "is a sweep"),
    ):
        with pytest.raises(SubmitError, match=says):
            wrong()
    with pytest.raises(SubmitError, match="goes on as it is"):
        mlpipe.Sweep("s").resume(from_step=1)
    with pytest.raises(SubmitError, match="another") as refused:
        mlpipe.sweep(asked.override({"name": "other"}), "simulated", sweep_id="s")
    assert "mlpipe sweep --resume s" in str(refused.value.hint)


def test_a_sweep_whose_trials_all_fail_raises_and_one_in_the_background_has_a_driver(folder, monkeypatch):
    asked = pipeline(folder, {"fails": True})
    with pytest.raises(TrainError, match="no trial has a 'loss'") as caught:
        mlpipe.sweep(asked, "simulated", quiet=True)
    assert caught.value.kind == "failed"
    driven: list[str] = []
    monkeypatch.setattr("mlpipe.submit.detach.detach", lambda store, run_id: driven.append(run_id))
    left = mlpipe.sweep(asked, "simulated", sweep_id="later", wait=False, quiet=True)
    assert driven == ["later"]
    assert left.status == "pending"
    assert (left.trials, left.best) == ([], None)
    with pytest.raises(SubmitError, match="is pending"):
        left.check()
    with pytest.raises(SubmitError, match="not handed to jenkins"):
        mlpipe.sweep(asked, "jenkins", job="team/train")
