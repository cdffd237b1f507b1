"""What is known of this machine unasked: how it prices passes, what runs correct, which files count."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from mlpipe.plan import machine
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.hardware import cpu_speed, detect_hardware
from mlpipe.plan.machine import Core, Learnt, Machine
from mlpipe.plan.reference import reference_seconds
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.unit
PIPELINE = """
version: 1
name: q
store: ./runs
stages:
  - name: train
    train:
      model: {preset: llama-4m, seq_len: 256, vocab_size: 4096}
      data: {tokens: /data/corpus, batch_size: 8}
      steps: 40
      precision: PRECISION
    resources: {workers_per_node: 2, cpus: 2, memory: 8 GiB}
"""
CORE = {"bf16": Core(400e9, 0.14), "fp32": Core(100e9, 0.35)}


def known(*runs: Learnt, **core: Core) -> Machine:
    return Machine(machine.SCHEMA_VERSION, machine.torch(), core or CORE, runs)


def run(number: int, ratio: float, workers: int = 2, precision: str = "fp32") -> Learnt:
    return Learnt(f"run-{number}", "train", precision, workers, ratio)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLPIPE_CALIBRATE", "on")


def step_seconds(precision: str, more: str = "") -> float:
    pipeline = load_pipeline_text(PIPELINE.replace("PRECISION", precision) + more, "q.yaml")
    plan = build_plan(pipeline, "train", Start("r", 1, "x"), stage_hardware(pipeline, "train"))
    return plan.work.training.predicted.step_seconds


@pytest.mark.usefixtures("on")
def test_a_precision_is_priced_as_the_core_was_measured_in_it():
    catalogue = {precision: step_seconds(precision) for precision in machine.PRECISIONS}
    machine.save(known())
    measured = {precision: step_seconds(precision) for precision in machine.PRECISIONS}
    assert (
        1.8 < measured["fp32"] / measured["bf16"] < 0.35 / 0.14
    )  # the update and its collective are the same
    assert catalogue["fp32"] / catalogue["bf16"] < 1.1
    slower = {
        name: dataclasses.replace(core, passes_seconds=2 * core.passes_seconds) for name, core in CORE.items()
    }
    machine.save(known(**slower))
    assert step_seconds("fp32") == pytest.approx(2 * measured["fp32"], rel=0.1)


def test_the_reference_model_takes_what_was_measured_of_it():
    speed = known().speed(cpu_speed(4.0), 2, 4.0)
    assert speed.passes_seconds == {"bf16": 0.14 / 4, "fp32": 0.35 / 4}
    assert speed.peak_flops["bf16"] * speed.achievable_ratio == pytest.approx(4 * 400e9)
    assert "short measurement" in (speed.calibrated or "")
    assert cpu_speed(4.0).calibrated is None


def test_runs_correct_their_precision_by_the_median_of_as_many_workers():
    rows = [run(0, 1.2), run(1, 1.5), run(2, 9.0), run(3, 3.0, workers=1), run(4, 2.0, precision="bf16")]
    speed = known(*rows).speed(cpu_speed(1.0), 2, 1.0)
    assert speed.passes_seconds == pytest.approx({"fp32": 1.5 * 0.35, "bf16": 2 * 0.14})
    assert known(*rows).speed(cpu_speed(1.0), 1, 1.0).passes_seconds["fp32"] == pytest.approx(3 * 0.35)


def test_runs_correct_the_catalogue_where_nothing_was_measured():
    speed = Machine(1, machine.torch(), {}, (run(0, 0.5),)).speed(cpu_speed(1.0), 2, 1.0)
    told = reference_seconds("fp32", "cpu", cpu_speed(1.0))
    assert speed.passes_seconds == pytest.approx({"fp32": told / 2})  # and nothing of bf16


def test_the_last_runs_count_each_once_and_no_wonder_does():
    one = known()
    for number in range(12):
        one = one.learn(run(number, 1.0 + number / 100))
    one = one.learn(run(11, 2.0)).learn(run(99, 1000.0)).learn(run(98, -1.0))
    assert [row.run for row in one.runs] == [f"run-{number}" for number in range(3, 12)]
    assert one.runs[-1].passes_ratio == 2.0


@pytest.mark.usefixtures("on")
def test_a_calibration_and_another_machine_and_off_go_before(monkeypatch: pytest.MonkeyPatch):
    machine.save(known())
    assert detect_hardware(None).speed.passes_seconds
    assert not detect_hardware(None, elsewhere=True).speed.passes_seconds
    monkeypatch.setenv("MLPIPE_CALIBRATE", "off")
    assert not detect_hardware(None).speed.passes_seconds


@pytest.mark.usefixtures("on")
@pytest.mark.parametrize(
    "change",
    [
        {"torch": "0.1"},
        {"schema_version": 2},
        {"core": {"bf16": {"matmul_flops": 1e9, "passes_seconds": 0.0}}},
        {"core": {"bf16": {"matmul_flops": math.inf, "passes_seconds": 1.0}}},
        {"core": {"fp8": {"matmul_flops": 1e9, "passes_seconds": 1.0}}},
        {"core": {"bf16": 3}},
        {"runs": [{"run": "r", "stage": "s", "precision": "bf16", "workers": 2, "passes_ratio": 0}]},
    ],
)
def test_a_file_that_lies_counts_for_nothing(change):
    machine.save(known())
    assert machine.is_known()
    data = json.loads(machine.path().read_bytes()) | change
    machine.path().write_text(json.dumps(data))
    assert machine.read() is None
    assert not machine.is_known()
    assert not detect_hardware(None).speed.passes_seconds


@pytest.mark.usefixtures("on")
def test_half_a_measurement_is_used_and_is_not_all():
    machine.save(known(bf16=CORE["bf16"]))
    assert detect_hardware(None).speed.passes_seconds.keys() == {"bf16"}
    assert not machine.is_known()


def test_the_version_of_torch_is_its_folders_and_else_what_metadata_says(monkeypatch, tmp_path):
    (tmp_path / "torch-2.15.0+cpu.dist-info").mkdir()
    monkeypatch.setattr(machine.sys, "path", [str(tmp_path / "none"), str(tmp_path)])
    assert machine.torch.__wrapped__() == "2.15.0+cpu"
    monkeypatch.setattr(machine.sys, "path", [])
    assert machine.torch.__wrapped__() == ""
