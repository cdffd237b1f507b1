"""The GPU suite without a GPU: its arithmetic, its models, and a tiny run on a machine that lacks all
packages but PyTorch and NumPy. No figure of it means anything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit import plans
from kit.warm import Popen

from benchmarks import measure
from benchmarks.gpu import models, rows, work
from mlpipe._core.quantized import is_quantized
from mlpipe.train.flops import count_flops_per_token

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, str]:
    """The environment of a process, and of all that it starts, in which only torch and numpy are there."""
    folder = tmp_path_factory.mktemp("absent")
    (folder / "sitecustomize.py").write_text(
        "import sys\nfrom kit.bare import Absent\nsys.meta_path.insert(0, Absent())\n"
    )
    env = plans.environment()
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT / "src"), env["PYTHONPATH"]])
    blocked = subprocess.run([sys.executable, "-c", "import pydantic"], env=env, capture_output=True)
    assert blocked.returncode == 1, "the packages are not hidden"
    return env


def test_the_suite_runs_on_torch_and_numpy_alone(bare, tmp_path):
    """It and its launchers are forks that have torch; its worker is imported alone, too."""
    imports = [sys.executable, "-c", "import benchmarks.gpu.worker"]
    subprocess.run(imports, cwd=ROOT, env=bare, check=True, timeout=300)
    argv = [sys.executable, "-m", "kit.bare", "benchmarks.gpu", "--device", "cpu", "--tiny"]
    output = tmp_path / "output"
    with output.open("w") as log:
        argv += ["--results", str(tmp_path)]
        suite = Popen("ranks", argv, cwd=ROOT, env=bare, stdout=log, stderr=log)
    try:
        assert suite.wait(500) == 0, output.read_text()[-3000:]
    finally:
        suite.kill()
    body = json.loads((tmp_path / "gpu.json").read_text())
    assert {"mlpipe", "torch"} <= body["versions"].keys()
    found = {(row["work"], row["figure"]): row for row in body["figures"]}
    for case in work.TINY_CASES:
        assert not [row for row in body["figures"] if row["work"] == case.name and "reason" in row]
        row = found[case.name, "tokens a second"]
        assert row["rounds"] == case.rounds
        assert row["ours"] > 0
        assert row["best_peer"] > 0
        model = work.TINY[case.model]
        peak = row["case"]["peak_flops"]
        mfu = row["ours"] * work.flops_of(case, model) / peak
        assert found[case.name, "MFU"]["ours"] == pytest.approx(mfu)
    assert found[work.TINY_CASES[0].name, "MFU, goal"]["met"] is False


def test_a_training_runs_on_torch_and_numpy_alone(bare, tmp_path):
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=4000)
    plan = plans.train_plan(
        tmp_path / "store", tokens, strategy="single", world_size=1, steps=2, launch={"metrics_port": 0}
    )
    process = plans.start(plan, tmp_path / "scratch", env=bare, warm=False)
    try:
        assert process.wait(300) == 0, plans.log_of(tmp_path / "scratch")
    finally:
        process.kill()
        process.wait(300)
    assert len(plans.losses(tmp_path / "store", plan)) == 2
    assert plans.outcome(tmp_path / "store", plan)["checkpoint"]
    log = plans.log_of(tmp_path / "scratch")
    assert "/metrics is off" in log or "no /metrics" in log, log


def test_a_gpu_is_asked_for_before_anything_is_written(tmp_path):
    argv = [sys.executable, "-m", "benchmarks.gpu", "--results", str(tmp_path)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert "no GPU" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [*work.MODELS, *work.TINY])
def test_parameters_are_counted_as_they_are_built(name):
    model = {**work.MODELS, **work.TINY}[name]
    with torch.device("meta"):
        built = models.build(model.architecture, **model.fields)
    assert sum(p.numel() for p in built.parameters()) == model.num_params()


def test_gpt2_is_of_the_published_size():
    fields = {**work.MODELS["gpt2-124m"].fields, "vocab_size": 50_257}
    assert replace(work.MODELS["gpt2-124m"], fields=fields).num_params() == 124_439_808


def plan_of(case, folder):
    return work.plan_of(
        case, work.TINY[case.model], folder, device="cpu", memory_bytes=2**30, peak=None, peak_name="none"
    ).work


def test_flops_are_those_that_torch_counts(tmp_path):
    plan = plan_of(work.TINY_CASES[0], tmp_path)
    ids = torch.zeros(2, plan.model.seq_len, dtype=torch.int64)
    counted = count_flops_per_token(plan.model, {"inputs": ids, "targets": ids})
    assert counted == plan.num_flops_per_token


def test_a_device_gets_the_microbatch_that_fits_it():
    model = work.MODELS["gpt2-1.5b"]
    sizes = [model.micro_batch_on(gib * 2**30) for gib in (139, 79, 24)]
    assert sizes == [16, 8, 2]
    for one in work.MODELS.values():
        assert not any(one.batch % size for size in one.micro_batch.values())
        assert 0 in one.micro_batch


def test_every_case_has_a_name_of_its_own_and_a_model():
    names = [case.name for case in work.CASES]
    assert len(set(names)) == len(names)
    assert all(case.model in work.MODELS for case in work.CASES)
    first = work.CASES[0]
    assert (first.name, first.goal_mfu) == ("gpt2-1.5b", 0.55)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
    ],
)
def test_the_peak_is_that_of_the_card(name, entry):
    found = work.gpu_of(name)
    assert (found and found[0]) == entry


def answer(**more):
    one = {"mlpipe": {"tokens_per_second": 110.0}, "raw": {"tokens_per_second": 100.0}}
    one["raw again"] = one["raw"]
    return {"rounds": [one, one], "peak_flops": 1e6, "complete": True, **more}


def by_figure(found):
    return {row["figure"]: row for row in found}


CASE, MODEL = work.Case("gpt2-tiny", goal_mfu=0.55), work.TINY["gpt2-tiny"]


def test_a_goal_of_mfu_is_of_ours():
    peak = MODEL.num_flops_per_token() * 110.0 / 0.56
    good = by_figure(rows.rows_of(CASE, MODEL, answer(peak_flops=peak), None))
    assert good["MFU"]["ours"] == pytest.approx(0.56)
    assert good["MFU"]["ratio"] == pytest.approx(1.1)
    assert (good["MFU, goal"]["met"], good["tokens a second"]["met"]) == (True, True)
    bad = by_figure(rows.rows_of(CASE, MODEL, answer(peak_flops=peak * 1.1), None))
    assert (bad["MFU, goal"]["met"], bad["tokens a second"]["met"]) == (False, True)


def test_memory_is_held_against_the_plan_and_the_raw_loop():
    memory = {"allocated": 900, "reserved": 950, "process": 1_050}
    known = answer(memory=memory, raw_memory={"allocated": 1_000})
    distance = "peak memory, distance from the plan"
    found = by_figure(rows.rows_of(CASE, MODEL, known, 1_000))
    assert found["peak memory of the process"]["ratio"] == pytest.approx(1.05)
    assert found[distance]["met"] is True
    assert found["peak memory of tensors"]["met"] is True
    assert by_figure(rows.rows_of(CASE, MODEL, known, 900))[distance]["met"] is False
    own = by_figure(rows.rows_of(CASE, MODEL, known, None))
    assert own["peak memory of the process"]["best_peer"] is None
    assert "user's own model" in own["peak memory of the process"]["reason"]
    assert distance not in own


def test_rows_say_of_their_goal_what_their_ratio_says():
    """As tests/unit/test_benchmark_results.py asks of whatever is committed."""
    memory = {"allocated": 900, "reserved": 950, "process": 1_050}
    known = answer(memory=memory, raw_memory={"allocated": 1_000})
    found = rows.rows_of(CASE, MODEL, known, 1_000) + rows.rows_of(CASE, MODEL, {"error": "no"}, None)
    for row in found:
        if row["goal"] is None:
            assert row["met"] is None
            continue
        interval, higher = row["ratio_interval"], row["higher_is_better"]
        assert row["met"] == measure.reaches(row["goal"], row["ratio"], interval, higher_is_better=higher)


def test_what_failed_is_a_row_with_its_reason():
    (row,) = rows.rows_of(CASE, MODEL, {"error": "OutOfMemoryError: CUDA out of memory"}, None)
    assert (row["ours"], row["met"]) == (None, None)
    assert "out of memory" in row["reason"]
    cut = by_figure(rows.rows_of(CASE, MODEL, answer(complete=False, error="cut off after 75 s"), None))
    assert cut["tokens a second"]["cut"] is True
    assert "cut off" in rows.table(list(cut.values()))
    alone = answer(raw_error="OutOfMemoryError: too large")
    alone["rounds"] = [{"mlpipe": {"tokens_per_second": 110.0}}]
    found = by_figure(rows.rows_of(CASE, MODEL, alone, None))
    assert found["tokens a second"]["ours"] == 110.0
    assert found["tokens a second"]["ratio"] is None
    assert "too large" in found["tokens a second"]["reason"]


def test_a_variant_stands_beside_its_model():
    fast = work.Case("gpt2-tiny", float8=True)
    figures = rows.rows_of(CASE, MODEL, answer(), None) + rows.rows_of(fast, MODEL, answer(), None)
    (row,) = rows.variants(figures, [CASE, fast], work.TINY)
    assert (row["work"], row["peer"], row["ratio"]) == ("gpt2-tiny, float8", "gpt2-tiny", 1.0)


def test_packed_samples_stand_beside_a_row_for_each():
    whole, packed = work.Case("llama-tiny"), work.Case("llama-tiny", documents=True)
    model = work.TINY["llama-tiny"]
    figures = [row for case in (whole, packed) for row in rows.rows_of(case, model, answer(), None)]
    found = by_figure(rows.variants(figures, [whole, packed], work.TINY))
    lengths = work.document_lengths(4 * 32, 32)
    assert sum(lengths) == 4 * 32
    assert max(lengths) <= 32
    assert found["tokens a second, packed"]["ratio"] == pytest.approx(len(lengths) * 32 / sum(lengths))
    assert work.flops_of(packed, model) < work.flops_of(whole, model)


def test_a_packed_row_is_its_samples_one_after_the_other():
    """Each sees itself alone, from position 0 on."""
    fields = work.TINY["llama-tiny"].fields
    torch.manual_seed(0)
    packed = models.build("llama", documents=[5, 3, 8], **fields)
    alone = models.build("llama", **fields)
    alone.load_state_dict(packed.state_dict())
    ids = torch.randint(0, fields["vocab_size"], (2, 8))
    parts = [alone(part[None]) for part in ids.flatten().split([5, 3, 8])]
    torch.testing.assert_close(packed(ids), torch.cat(parts, dim=1).view(2, 8, -1))


@pytest.mark.parametrize(("base", "bits"), [("int8", 8.25), ("nf4", 4.25)])
def test_what_a_base_of_few_bits_spares_is_in_the_plan(base, bits):
    """The fp32 values of the layers, and what a pass casts them to, which waits for the backward pass."""
    model = work.MODELS["llama-1b"]
    whole, few = (
        work.predicted_bytes(work.Case("llama-1b", rank=16, base=one), model, 2, "cuda")
        for one in (None, base)
    )
    matrices = sum(one.size for one in model.llama.named_tensors() if is_quantized(one.name))
    assert whole - few == pytest.approx(matrices * (32 + 16 - bits) / 8, rel=0.1)
    assert whole < work.predicted_bytes(work.Case("llama-1b"), model, 2, "cuda")
