"""When this machine is measured unasked, what a measurement that fails leaves, and what runs teach."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.synthetic_run import Life, stage_state, write_run, write_train_stage

from mlpipe._core.cpu_load import Load
from mlpipe.observe.predicted import measured
from mlpipe.observe.runview import view_run
from mlpipe.plan import machine
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.candidates import priced
from mlpipe.plan.hardware import cpu_speed
from mlpipe.plan.machine import Core, Learnt, Machine
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import Prediction
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Pipeline
from mlpipe.store.open import open_store
from mlpipe.store.runs import RunState, StageState
from mlpipe.submit import measuring
from mlpipe.submit.standby import Standby

pytestmark = pytest.mark.unit
TEXT = """
version: 1
name: q
store: ./runs
stages:
  - name: corpus
    command: [echo]
  - name: train
    needs: [corpus]
    train:
      model: {preset: llama-4m, seq_len: 256, vocab_size: 4096}
      data: {tokens: "{{stages.corpus.output}}", batch_size: 8}
      steps: 40
    resources: {workers_per_node: 2, cpus: 2, memory: 8 GiB}
"""
KNOWN = Machine(machine.SCHEMA_VERSION, machine.torch(), {"bf16": Core(4e11, 0.14), "fp32": Core(1e11, 0.35)})


@pytest.fixture(autouse=True)
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPIPE_CALIBRATE", "on")


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Lets the process that measures say this instead; returns where it leaves a mark when it starts."""

    def say(script: str) -> Path:
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        return tmp_path / "started"

    return say


LINES = "\n".join(
    f'echo \'{{"precision": "{name}", "matmul_flops": {core.matmul_flops}, '
    f'"passes_seconds": {core.passes_seconds}}}\''
    for name, core in KNOWN.core.items()
)


def pipeline(*overrides: str) -> Pipeline:
    return load_pipeline_text(TEXT, "q.yaml", overrides=overrides)


def run(corpus: str) -> RunState:
    state: dict[str, StageState] = {
        "corpus": stage_state(state=corpus),
        "train": stage_state(state="pending"),
    }
    store = open_store(os.path.join(os.environ["XDG_STATE_HOME"], "store"))
    write_run(store, "r", state, TEXT)
    return view_run(store, "r").run


def test_a_plan_measures_once_and_says_where_it_is_kept(says):
    started, said = says(LINES), list[str]()
    measuring.measure_first(pipeline(), said.append)
    measuring.measure_first(pipeline(), said.append)
    assert machine.read() == KNOWN
    assert len(started.read_text().splitlines()) == len(said) == 1
    assert str(machine.path()) in said[0]


@pytest.mark.parametrize(
    "overrides",
    [("train.resources.hardware=x.json",), ("train.resources.gpus_per_node=1", "train.resources.gpu=T4")],
)
def test_what_has_figures_of_its_own_is_not_measured(says, overrides):
    started = says(LINES)
    given = (
        pipeline(*overrides)
        if "gpu" not in overrides[0]
        else pipeline("train.resources={gpus_per_node: 1, gpu: T4}")
    )
    measuring.measure_first(given, lambda text: None)
    assert not started.exists()


def test_off_measures_nothing_and_learns_nothing(says, monkeypatch, tmp_path):
    started = says(LINES)
    monkeypatch.setenv("MLPIPE_CALIBRATE", "off")
    measuring.measure_first(pipeline(), lambda text: None)
    measuring.learn(view_run(*finished(tmp_path)))
    assert not started.exists()
    assert not machine.path().exists()


@pytest.mark.parametrize(
    "script", ["exit 1", "kill -9 $$", 'echo \'{"precision": "bf\'', "printf '{\"precision\"'"]
)
def test_a_measurement_that_fails_leaves_the_catalogue(says, script):
    says(script)
    said: list[str] = []
    measuring.measure_first(pipeline(), said.append)
    assert machine.read() is None
    assert "catalogue" in said[0]


def test_a_run_measures_beside_what_its_training_waits_for(says):
    says(LINES)
    with measuring.beside(pipeline(), run("pending"), stage_hardware, lambda text: None) as (hardware, _):
        assert hardware(pipeline(), "train").speed.passes_seconds


def test_a_training_that_starts_at_once_waits_for_nothing(says):
    started = says(LINES)
    with measuring.beside(pipeline(), run("done"), stage_hardware, lambda text: None) as (hardware, _):
        assert not hardware(pipeline(), "train").speed.passes_seconds
    assert not started.exists()


def test_a_training_does_not_wait_for_one_that_hangs_and_it_ends_with_the_run(says):
    started = says(f"{LINES.splitlines()[0]}\nexec sleep 1000")
    state = run("pending")
    with measuring.beside(pipeline(), state, stage_hardware, lambda text: None) as (hardware, _):
        assert hardware(pipeline(), "train").speed.passes_seconds.keys() == {"bf16"}  # what it had said
    with measuring.beside(pipeline(), state, stage_hardware, lambda text: None):
        pass  # cancelled before the training's turn
    for pid in started.read_text().split():
        assert not Path("/proc", pid).exists()


def finished(tmp_path: Path, state: str = "done", threads: str = "1", steps: int = 40) -> Any:
    store, key = open_store(str(tmp_path / "finished")), "runs/r/stages/train/attempt-1/plan.json"
    outcome = {"outcome": "done", "step": steps, "exit_code": 0}
    told: dict[str, Any] = {"predicted": Prediction(610_000_000, 0.4, 1.0, 1.0), "precision": "fp32"}
    training = build_plan(pipeline(), "train", Start("r", 1, "x"), stage_hardware(pipeline(), "train"))
    told["model"] = training.work.training.model
    write_train_stage(store, "r", [Life(1, 0, 0, steps)], steps=steps, outcome=outcome, **told)
    plan = Plan.from_json(store.get(key))
    launch = plan.launch._replace(env={"OMP_NUM_THREADS": threads})
    store.put(key, replace(plan, launch=launch).to_json().encode())
    write_run(store, "r", {"train": stage_state(state=state)}, TEXT)
    return store, "r"


def test_a_finished_training_corrects_what_the_next_one_is_told(tmp_path):
    machine.save(KNOWN)
    view = view_run(*finished(tmp_path))
    measuring.learn(view)
    known = machine.read()
    assert known is not None
    (row,) = known.runs
    assert (row.run, row.stage, row.precision, row.workers) == ("r", "train", "fp32", 2)
    training = view.stages[0].training
    assert training is not None
    real = measured(view.stages[0])
    assert real is not None
    hardware = stage_hardware(pipeline(), "train")._replace(speed=known.speed(cpu_speed(1.0), 2, 1.0))
    assert priced(training, hardware).step_seconds == pytest.approx(real[1], rel=0.02)
    measuring.learn(view)
    assert machine.read() == known, "the same run, by the same figures"


@pytest.mark.parametrize("odd", [{"state": "failed"}, {"threads": "4,2"}, {"steps": 12}])
def test_nothing_is_learnt_of_what_did_not_end_well_or_is_too_short(tmp_path, odd):
    machine.save(KNOWN)
    measuring.learn(view_run(*finished(tmp_path, **odd)))
    assert machine.read() == KNOWN


def test_nothing_is_learnt_of_a_machine_that_others_used(tmp_path, monkeypatch):
    machine.save(KNOWN)
    monkeypatch.setattr(measuring, "worst_load", lambda stage: Load(0.5, 0.0, 0.5))
    measuring.learn(view_run(*finished(tmp_path)))
    assert machine.read() == KNOWN


def test_one_process_measures_at_a_time_and_a_plan_waits_for_it(says, monkeypatch):
    started, state, said = says("exec sleep 1000"), run("pending"), list[str]()
    with measuring.beside(pipeline(), state, stage_hardware, said.append):
        with measuring.beside(pipeline(), state, stage_hardware, said.append) as (second, _):
            assert not second(pipeline(), "train").speed.passes_seconds
        monkeypatch.setattr(measuring, "_LONGEST_SECONDS", 0.2)
        measuring.measure_first(pipeline(), said.append)
        # an end of the one that measures is the end of its lock, whatever its parent does with it later
        (pid,) = started.read_text().split()
        os.kill(int(pid), signal.SIGKILL)
        monkeypatch.setattr(measuring, "_LONGEST_SECONDS", 600.0)
        says(LINES)
        measuring.measure_first(pipeline(), said.append)
    assert machine.read() == KNOWN
    assert len(said) == 1


def test_what_another_has_learnt_meanwhile_stays(says):
    says(LINES)
    learnt = KNOWN.learn(Learnt("r", "train", "bf16", 2, 1.5))
    with measuring.beside(pipeline(), run("pending"), stage_hardware, lambda text: None) as (hardware, _):
        machine.save(learnt)
        hardware(pipeline(), "train")
    assert machine.read() == learnt


def test_a_run_that_ends_before_its_training_keeps_what_was_measured(says):
    started = says(LINES)
    with measuring.beside(pipeline(), run("pending"), stage_hardware, lambda text: None):
        while not (started.exists() and started.read_text()):
            pass
        while "(zombie)" not in Path("/proc", started.read_text().strip(), "status").read_text():
            pass
    assert machine.read() == KNOWN


def test_what_cannot_be_kept_is_not_measured(says):
    started, said = says(LINES), list[str]()
    Path(os.environ["XDG_STATE_HOME"]).write_text("in the way")
    measuring.measure_first(pipeline(), said.append)
    assert not started.exists()
    assert "could not be kept" in said[0]


def test_ctrl_c_ends_what_measures(says, monkeypatch):
    started = says("exec sleep 1000")

    def interrupted(self: Standby, seconds: float = 0.0) -> bool:
        while not (started.exists() and started.read_text()):
            pass
        raise KeyboardInterrupt

    monkeypatch.setattr(Standby, "has_measured", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure_first(pipeline(), lambda text: None)
    assert not Path("/proc", started.read_text().strip()).exists()
