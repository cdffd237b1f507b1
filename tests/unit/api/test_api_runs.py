"""Runs from Python, of command stages: nothing here needs torch."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from kit.command_runs import shell, until, write_spec

import mlpipe
from mlpipe._core.errors import StoreError, SubmitError, TrainError
from mlpipe.api import run as api_run
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MLPIPE_STORE", raising=False)
    return tmp_path


def pipeline(folder: Path, **stages: str) -> mlpipe.LoadedPipeline:
    return mlpipe.load(write_spec(folder, {name: shell(script) for name, script in stages.items()}))


def test_a_run_is_started_looked_at_and_found_again(folder, capsys):
    asked = pipeline(folder, a="echo one; echo two", b="echo three")
    assert asked.stages == ["a", "b"]
    assert asked.override({"name": "other"}).name == "other"
    planned = mlpipe.plan(asked)
    assert list(planned) == ["a", "b"]
    assert str(planned["a"]).startswith("a (command): sh -c")
    assert list(mlpipe.plan(asked, stage="b")) == ["b"]
    run = mlpipe.run(asked, run_id="r")
    assert (run.id, run.status, run.stages) == ("r", "done", {"a": "done", "b": "done"})
    assert run.store == str(folder / "runs")
    assert run.wait(timeout=0) == "done"
    assert run.check() is run
    assert run.logs() == "a | one\na | two\nb | three\n"
    assert run.logs(stage="a", tail=1) == "two\n"
    assert (run.metrics(), run.checkpoint()) == ([], None)
    assert [found.id for found in mlpipe.runs()] == ["r"]
    assert mlpipe.Run("r").status == "done"
    told = capsys.readouterr()
    assert told.out == ""
    assert "a  done" in told.err
    mlpipe.run(asked, quiet=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(StoreError, match="there is no run nobody"):
        mlpipe.Run("nobody")
    with pytest.raises(StoreError, match="has no stage 'c'"):
        run.logs(stage="c")
    with pytest.raises(mlpipe.PlanError, match="has no stage 'c'"):
        mlpipe.plan(asked, stage="c")


def test_overrides_are_what_set_takes(folder):
    asked = (
        pipeline(folder, a="true").override({"a.env": {"A": "b c"}, "name": "x"}).override(["a.timeout=2 h"])
    )
    assert asked.spec.stages[0].env == {"A": "b c"}
    assert asked.spec.stages[0].timeout == "2 h"
    assert asked.override({"a.timeout": None}).spec.stages[0].timeout is None
    with pytest.raises(mlpipe.SpecError, match="no stage 'z'"):
        asked.override({"z.steps": 3})


def test_a_run_that_fails_raises_and_goes_on(folder):
    asked = pipeline(folder, a="echo hello", b="test -e good || { echo bad >&2; exit 7; }")
    with pytest.raises(TrainError, match="exited with code 7") as caught:
        mlpipe.run(asked, run_id="r", quiet=True)
    assert caught.value.kind == "failed"
    assert caught.value.where == "run r, stage b"
    run = mlpipe.Run("r")
    assert (run.status, run.stages["a"]) == ("failed", "done")
    (folder / "good").touch()
    assert run.resume(quiet=True).status == "done"
    assert run.state().stages["a"].attempt == 1


def test_mistakes_are_told_before_anything_starts(folder):
    asked = pipeline(folder, a="true")
    mlpipe.run(asked, run_id="r", quiet=True)
    with pytest.raises(StoreError, match="exists already") as caught:
        mlpipe.run(asked, run_id="r", quiet=True)
    assert caught.value.kind == "input"
    with pytest.raises(SubmitError, match="there is no backend 'moon'"):
        mlpipe.submit(asked, "moon")
    with pytest.raises(SubmitError, match="has no option 'namespac'"):
        mlpipe.submit(asked, "kubernetes", namespac="team")
    with pytest.raises(SubmitError, match="needs job"):
        mlpipe.submit(asked, "jenkins")


def test_ctrl_c_stops_the_run_and_then_raises(folder):
    asked = pipeline(folder, a="touch begun; test -e good || sleep 600")
    before = signal.getsignal(signal.SIGINT)

    def press() -> None:
        until(lambda: (folder / "begun").exists(), "the stage to begin")
        os.kill(os.getpid(), signal.SIGINT)

    presses = threading.Thread(target=press, daemon=True)
    presses.start()
    with pytest.raises(KeyboardInterrupt):
        mlpipe.run(asked, run_id="r", quiet=True)
    presses.join(300)
    assert not presses.is_alive()
    assert signal.getsignal(signal.SIGINT) is before
    run = mlpipe.Run("r")
    assert run.status == "cancelled"
    with pytest.raises(TrainError) as caught:
        run.check()
    assert caught.value.kind == "cancelled"
    (folder / "good").touch()
    assert run.resume(quiet=True).status == "done"


def test_runs_of_a_thread_need_no_signals(folder):
    asked = pipeline(folder, a="true")
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(mlpipe.run(asked, quiet=True).status))
    thread.start()
    thread.join(300)
    assert ended == ["done"]


def test_a_run_in_the_background_is_waited_for_and_cancelled(folder):
    asked = pipeline(folder, a="touch begun; sleep 600")
    run = mlpipe.submit(asked, run_id="r")
    try:
        until(lambda: (folder / "begun").exists(), "the stage to begin")
        assert run.status == "running"
        with pytest.raises(SubmitError, match=r"has not ended within 0\.1 s: it is running"):
            run.wait(timeout=0.1)
        with pytest.raises(SubmitError, match="is running"):
            run.check()
        assert mlpipe.submit(asked, run_id="r").id == "r"  # adopted
    finally:
        assert run.cancel(timeout=300) == "cancelled"
    assert run.wait(timeout=300) == "cancelled"


def test_a_run_that_nobody_ever_drove_is_not_waited_for(folder, monkeypatch):
    monkeypatch.setattr(api_run, "_DRIVERLESS_SECONDS", 0.0)
    monkeypatch.setattr(api_run, "_POLL_SECONDS", 0.01)
    store = FolderStore(folder / "runs")
    for backend in ("local", "kubernetes"):
        runs.create_run(store, backend, "version: 1", "0" * 64, ["a"], backend, {"pipeline": "p"})
    with pytest.raises(SubmitError, match="nobody drives run local"):
        mlpipe.Run("local").wait(timeout=300)
    with pytest.raises(SubmitError, match="has not ended within"):  # where drivers wait for room
        mlpipe.Run("kubernetes").wait(timeout=0.1)


def test_a_table_is_a_list_of_rows():
    table = mlpipe.Table([{"a": 1}, {"a": 2, "b": 3}])
    assert table.columns == ["a", "b"]
    assert table.column("b") == [None, 3]
    assert table.where(a=2) == [{"a": 2, "b": 3}]
    with pytest.raises(KeyError, match="'c' is not one of a, b"):
        table.column("c")
