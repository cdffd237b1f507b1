"""The planner's prediction beside what a run measured, on the page and fed back into a calibration."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kit.synthetic_run import Life, stage_state, write_run, write_train_stage

from mlpipe._core.errors import PlanError
from mlpipe._core.serial import to_json
from mlpipe.cli.calibrate import command as calibrate
from mlpipe.cli.session import CliSession
from mlpipe.observe.exporter import Fleet
from mlpipe.observe.report import build_report
from mlpipe.observe.runview import view_run
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.calibration import Calibration, Compared, load, save
from mlpipe.plan.hardware import CPU_CORE
from mlpipe.plan.measured import KernelRates, Measured
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import Prediction, TrainPlan
from mlpipe.spec.load import load_pipeline, load_pipeline_text
from mlpipe.store.base import Store
from mlpipe.store.open import open_store

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]
RATES = KernelRates(2e11, ((1e6, 0.25), (1e8, 0.5), (1e9, 1.0)), 1e11, 5e9, 4e9)
TWO = Measured({"fp32": RATES}, 1e10, 9e9, 5e-6, 1e9, 1e-4, 3e8)
ONE = dataclasses.replace(TWO, link_bytes_per_second=0.0, collective_seconds=0.0)


def calibration(*runs: Compared) -> Calibration:
    return Calibration(1, "a CPU", "cpu", {"1": ONE, "2": TWO}, runs)


RUN = "q-20260101-000000-0000"
PIPELINE = """
version: 1
name: q
store: ./runs
stages:
  - name: train
    train:
      model: {preset: llama-4m, seq_len: 256, vocab_size: 4096}
      data: {tokens: /data/corpus, batch_size: 16, micro_batch: 4}
      steps: 40
      strategy: fsdp
      precision: fp32
      activation_checkpointing: none
      checkpoint: {every: 100 steps}
    resources: {workers_per_node: 2, cpus: 2, memory: 8 GiB}
"""


def planned(file: Path | None = None) -> TrainPlan:
    overrides = [f"train.resources.hardware={file}"] if file else []
    pipeline = load_pipeline_text(PIPELINE, "q.yaml", overrides=overrides)
    plan = build_plan(pipeline, "train", Start(RUN, 1, "x"), stage_hardware(pipeline, "train"))
    return plan.work.training


def ran(predicted: Prediction | None, tmp_path: Path, run: str = RUN) -> Store:
    store = open_store(str(tmp_path / "store"))
    outcome = {"outcome": "done", "step": 40, "exit_code": 0}
    lives = [Life(1, 0, 0, 40)]
    told: dict[str, Any] = {"predicted": predicted, "model": planned().model, "precision": "fp32"}
    write_train_stage(store, run, lives, steps=40, outcome=outcome, **told)
    write_run(store, run, {"train": stage_state()}, PIPELINE)
    return store


def feed_back(tmp_path: Path, run: str = RUN) -> Result:
    argv = ["--out", str(tmp_path / "hardware.json"), "--from-run", run, "--store", str(tmp_path / "store")]
    return CliRunner().invoke(calibrate, argv, obj=CliSession())


def test_the_report_has_the_row_and_a_run_without_a_prediction_has_none(tmp_path: Path) -> None:
    page = build_report(ran(Prediction(610_000_000, 0.4, 1.0, 1.0), tmp_path), "q-20260101-000000-0000")
    assert "Predicted beside measured" in page
    assert "400 ms" in page
    assert "581.7 MiB" in page  # predicted
    assert "steps, all told" not in page, "without a price"
    assert "workers wait" not in page, "nobody knows the lengths"
    idle = Prediction(610_000_000, 0.4, 1.0, 1.0, {"collective": 0.25, "resident": 0.1})
    assert 'share of a step for which workers wait (collective)</td><td class="n">25.0 %' in (
        build_report(ran(idle, tmp_path / "idle"), "q-20260101-000000-0000")
    )
    assert "Predicted beside measured" not in build_report(
        ran(None, tmp_path / "none"), "q-20260101-000000-0000"
    )


def test_the_cost_of_the_steps_that_are_done_on_the_page_and_by_the_exporter(tmp_path: Path) -> None:
    run = "q-20260101-000000-0000"
    store = ran(Prediction(610_000_000, 0.45, 1.0, 1.0), tmp_path, run)
    key = f"runs/{run}/stages/train/attempt-1/plan.json"
    priced = dataclasses.replace(Plan.from_json(store.get(key)), price_usd_per_device_hour=10.0)
    store.put(key, priced.to_json().encode())
    page = build_report(store, run)
    assert "cost of 40 steps, all told" in page
    assert "0.1 USD" in page  # 40 steps of 0.45 s on 2 devices
    fleet = Fleet(store)
    fleet.round()
    found = {
        sample.labels["kind"]: sample.value
        for family in fleet.collect()
        if family.name == "mlpipe_run_training_cost_usd"
        for sample in family.samples
    }
    assert found["predicted"] == pytest.approx(0.1)
    (ledger,) = [stage.ledger for stage in view_run(store, run).stages]
    assert ledger is not None
    assert found["measured"] == ledger.cost_usd > 0


def test_a_run_is_fed_back_once_and_beside_what_the_file_itself_predicts(tmp_path: Path) -> None:
    """Not beside what it was planned by: the catalogue, or the file with the corrections of other runs."""
    file = tmp_path / "hardware.json"
    ran(Prediction(6_000_000_000, 36.0, memory_ratio=1.2, time_ratio=0.9), tmp_path)
    save(file, calibration())
    alone = planned(file).predicted
    assert alone is not None
    other = Compared("other", "train", 1e9, 3e9, 1.0, 5.0)
    for before in ((), (other,)):
        save(file, calibration(*before))
        for _ in range(2):
            done = feed_back(tmp_path)
            assert f"compared with {len(before) + 1} run" in done.output, done.output
        *kept, row = load(file).runs
        assert tuple(kept) == before
        assert row.predicted_memory_bytes == alone.memory_bytes
        assert row.predicted_step_seconds == pytest.approx(alone.step_seconds, rel=1e-4)
        assert row.measured_step_seconds == pytest.approx(0.36, rel=0.1)
        assert row.measured_memory_bytes == pytest.approx(6.2e8, rel=0.02)
        if not before:
            now = planned(file).predicted
            assert now is not None
            assert now.step_seconds == pytest.approx(row.measured_step_seconds, rel=1e-3)
            assert now.memory_bytes == pytest.approx(row.measured_memory_bytes, rel=1e-3)


def test_a_run_that_the_file_says_nothing_of_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    ran(Prediction(600_000_000, 0.36, 1.0, 1.0), tmp_path)
    low = {
        name: dataclasses.replace(one, kernels={"bf16": RATES}) for name, one in calibration().ranks.items()
    }
    for bad, words in (
        (dataclasses.replace(calibration(), device="cuda"), "measured on cuda, and stage 'train' ran on cpu"),
        (dataclasses.replace(calibration(), ranks=low), "the file has no fp32"),
    ):
        save(file, bad)
        done = feed_back(tmp_path)
        assert words in str(done.exception)
        assert load(file) == bad


def test_a_new_calibration_forgets_what_runs_taught_about_the_old_one_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hardware.json"
    save(file, calibration(Compared("r-1", "train", 1e9, 3e9, 1.0, 5.0)))
    monkeypatch.setattr("mlpipe.cli.calibrate._measure", lambda session, ranks, threads: TWO)
    arguments = ["--out", str(file), "--ranks", "1", "--force"]  # on a machine that tests share
    done = CliRunner().invoke(calibrate, arguments, obj=CliSession())
    assert "add them again: r-1" in done.output
    assert load(file).runs == ()
    assert load(file).ranks == {"1": TWO}


def test_a_plan_says_what_it_was_calibrated_by_and_is_byte_stable(tmp_path: Path) -> None:
    file = tmp_path / "hardware.json"
    slow = Compared("r", "train", 1e9, 1.1e9, 1.0, 2.0)
    odd = Compared("s", "train", 1e9, 9e9, 1.0, 50.0)
    texts, steps = [], []
    for runs in ((), (slow,), (slow, slow, odd)):
        save(file, calibration(*runs))
        pipeline = load_pipeline(
            ROOT / "pipelines" / "quickstart.yaml", overrides=[f"train.resources.hardware={file}"]
        )
        hardware = stage_hardware(pipeline, "train")
        texts.append(hardware.speed.calibrated)
        made = [build_plan(pipeline, "train", Start("r", 1, "x"), hardware).to_json() for _ in range(2)]
        assert made[0] == made[1]
        steps.append(json.loads(made[0])["train"]["predicted"]["step_seconds"])
    assert texts == [
        "calibrated with 2 ranks (a CPU)",
        "calibrated with 2 ranks (a CPU) and by 1 run",
        "calibrated with 2 ranks (a CPU) and by 3 runs",
    ]
    assert json.loads(made[0])["train"]["precision"] == "fp32"  # nobody measured bf16
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.01)
    assert steps[2] == steps[1]  # the median: one odd run moves nothing


def test_points_between_the_measured_ones(tmp_path: Path) -> None:
    speed = calibration().speed(2, CPU_CORE)
    assert speed.matmul_ratio("fp32", 1) == 0.25
    assert speed.matmul_ratio("fp32", 1e7) == pytest.approx(0.375)
    assert speed.matmul_ratio("fp32", 1e12) == 1.0
    assert calibration().speed(1, CPU_CORE).link_bytes_per_second == 1e9  # of the nearest with a link
    sound = to_json(calibration(Compared("r", "train", 1e9, 3e9, 1.0, 5.0)))
    lies = [
        re.sub(rf'"{name}": [^,\n]+', f'"{name}": {figure}', sound, count=1)
        for name in (
            "peak_flops",
            "memory_bytes_per_second",
            "link_bytes_per_second",
            "predicted_step_seconds",
        )
        for figure in ("-1", "1e300", "1e-300", "NaN", "9" * 400)
    ]
    lies += [sound.replace('"predicted_step_seconds": 1.0', '"predicted_step_seconds": 0.0')]
    lies += [re.sub(r'"matmul_points": \[.*?\n {10}\]', f'"matmul_points": {points}', sound, flags=re.DOTALL)
             for points in ("[]", "[[1.0]]", "[[1e9, 0.5], [1e6, 1.0]]", "[[0.0, 1.0]]",
                            "[[1e6, 1e300]]", "[[1e300, 0.5]]", "[[1e6, NaN]]")]  # fmt: skip
    lies += [sound.replace('"1": {', f'"{ranks}": {{', 1) for ranks in ("x", "-1", "9" * 5000)]
    assert sound not in lies
    for bad in (
        "{", "[]", '{"schema_version": 9, "name": "x", "device": "cpu", "ranks": {}, "runs": []}', *lies,
    ):  # fmt: skip
        (tmp_path / "bad.json").write_text(bad)
        with pytest.raises(PlanError) as caught:
            load(tmp_path / "bad.json")
        assert "mlpipe calibrate" in str(caught.value.hint)
    (tmp_path / "gpu.json").write_text("")
    save(tmp_path / "gpu.json", dataclasses.replace(calibration(), device="cuda"))
    pipeline = load_pipeline(
        ROOT / "pipelines" / "quickstart.yaml",
        overrides=[f"train.resources.hardware={tmp_path / 'gpu.json'}"],
    )
    with pytest.raises(PlanError, match="measured on cuda"):
        stage_hardware(pipeline, "train")
