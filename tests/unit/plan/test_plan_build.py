from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from mlpipe._core.errors import PlanError
from mlpipe._core.meshes import STRATEGIES, Strategy
from mlpipe._core.presets import PRESETS
from mlpipe.cli.session import CliSession
from mlpipe.cli.validate import command as validate
from mlpipe.kinds.train.spec import Preset
from mlpipe.plan import plan as plans
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.allocators import glibc
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.candidates import micro_batches, precision_on
from mlpipe.plan.hardware import CATALOGUE, CPU_CORE, GIB, GPUS, Hardware, detect_hardware
from mlpipe.plan.measured import KernelRates
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import traffic_bytes
from mlpipe.plan.plan import Plan
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.training import compare
from mlpipe.plan.updates import EmaPlan, ParameterGroup
from mlpipe.spec.load import load_pipeline, load_pipeline_text
from mlpipe.spec.machines import Device
from mlpipe.spec.model import Pipeline, Resources
from mlpipe.spec.problems import SpecErrors

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]
PIPELINES = sorted((ROOT / "pipelines").rglob("*.yaml"))
QUICKSTART = ROOT / "pipelines" / "quickstart.yaml"
LLM = ROOT / "pipelines" / "llm.yaml"


def cpu(num_workers: int = 2, memory_bytes: int = 4 * GIB, num_nodes: int = 1) -> Hardware:
    return Hardware("cpu", num_nodes, num_workers, memory_bytes, "CPU worker", {}, 4)


def plan_of(pipeline: Pipeline, stage: str, hardware: Hardware, **inputs: str) -> Plan:
    return build_plan(pipeline, stage, Start("r", 1, "./runs", inputs), hardware)


def quickstart(*overrides: str) -> Pipeline:
    return load_pipeline(QUICKSTART, overrides=overrides)


def train_of(pipeline: Pipeline, hardware: Hardware, **inputs: str) -> Any:
    return plan_of(pipeline, "train", hardware, **inputs).work


@pytest.mark.parametrize("path", PIPELINES, ids=lambda p: p.name)
def test_every_pipeline_plans_and_its_plans_read_back(path: Path) -> None:
    pipeline = load_pipeline(path)
    for stage in pipeline.stages:
        plan = plan_of(pipeline, stage.name, stage_hardware(pipeline, stage.name))
        assert plan.kind == stage.kind
        assert Plan.from_json(plan.to_json()) == plan
        with pytest.raises(AttributeError, match="tpyo"):
            plan.work.tpyo = 1  # type: ignore[attr-defined]


def test_a_document_names_the_source_of_the_mlpipe_that_wrote_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # a table is no document: nobody reads six hundred files for it
        patched.setattr(plans, "code_digest", lambda: pytest.fail("read for a plan that nobody wrote"))
        plan = plan_of(quickstart(), "corpus", cpu())
    ours = plans.code_digest()
    assert re.fullmatch("[0-9a-f]{64}", ours)
    assert Plan.from_json(plan.to_json()).code_digest == plan.to_plain()["code_digest"] == ours
    theirs = dataclasses.replace(plan, code_digest="0" * 64)
    assert theirs.to_plain()["code_digest"] == "0" * 64


def test_names_known_to_the_spec_are_the_plans() -> None:
    assert set(Preset.__args__) == PRESETS.keys()  # type: ignore[attr-defined]
    assert set(get_args(Strategy)) == STRATEGIES.keys() == ORDER.keys()


def test_same_bytes_in_another_process() -> None:
    code = (
        "import sys; from mlpipe.plan.build import *; from mlpipe.spec.load import load_pipeline\n"
        f"p = load_pipeline({str(QUICKSTART)!r})\n"
        "h = Hardware('cpu', 1, 2, 4 * 2**30, 'CPU worker', {}, 4)\n"
        "for s in p.stages:\n"
        "    sys.stdout.write(build_plan(p, s.name, Start('r', 1, './runs'), h).to_json())\n"
        "assert not {'torch', 'numpy', 'minio', 'click'} & sys.modules.keys()\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=300,
        ).stdout
        for seed in ("1", "2")
    ]
    here = "".join(plan_of(quickstart(), stage.name, cpu()).to_json() for stage in quickstart().stages)
    assert outputs[0] == outputs[1] == here.encode()


def test_what_the_trainer_imports_needs_neither_spec_nor_pydantic() -> None:
    code = (
        "import sys, mlpipe.plan.plan, mlpipe._core.gate, mlpipe._core.presets, mlpipe.plan.pricing,"
        " mlpipe.plan.flops, mlpipe.plan.choose, mlpipe.plan.hardware, mlpipe.plan.strategies\n"
        "print(sorted({'pydantic', 'yaml', 'mlpipe.spec', 'torch'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.strip() == "[]"


def test_inputs_fill_placeholders_and_the_rest_waits() -> None:
    text = """
version: 1
name: x
stages:
  - {name: a, command: [x]}
  - name: b
    needs: [a]
    command: [cp, "{{stages.a.output}}/f", "{{output}}", "{{store}}", "{{run.id}}", "{{{{x}}"]
  - name: c
    needs: [b]
    train:
      model: {entry: "m:f", args: {at: ["{{stages.b.output}}", "{{run.id}}", "{{{{x}}", 1]}}
      data: {entry: "m:g", batch_size: 4}
      steps: 1
    env: {WHERE: "{{stages.b.output}}", BOTH: "{{run.id}} {{stages.a.output}}"}
"""
    pipeline = load_pipeline_text(text, "x")
    plan = plan_of(pipeline, "b", cpu(), a="/data/a")
    assert plan.work.argv == ("cp", "/data/a/f", "{{output}}", "./runs", "r", "{{{{x}}")
    plan = plan_of(pipeline, "c", cpu(), b="/data/b")
    assert plan.work.training.model.build.args == {"at": ["/data/b", "r", "{{x}}", 1]}
    assert plan.launch.env["WHERE"] == "/data/b"
    assert plan.launch.env["BOTH"] == "r {{stages.a.output}}"


def test_the_vocabulary_is_the_tokens_once_they_exist(tmp_path: Path) -> None:
    def vocab_size(*overrides: str) -> int:
        size: int = train_of(quickstart(*overrides), cpu(), corpus=str(tmp_path)).model.build.args[
            "vocab_size"
        ]
        return size

    assert vocab_size() == PRESETS["llama-4m"].vocab_size
    (tmp_path / "manifest.json").write_text(json.dumps({"vocab_size": 1000}))
    assert vocab_size() == 1024
    assert vocab_size("train.model.vocab_size=2000") == 2000
    for bad in ("{", "[]", "{}", '{"vocab_size": "many"}', '{"vocab_size": 0}'):
        (tmp_path / "manifest.json").write_text(bad)
        with pytest.raises(PlanError, match=r"manifest|vocab_size"):
            vocab_size()


@given(st.integers(1, 4096), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 64)))
def test_batches_come_out_even_or_are_refused(batch: int, ranks: int, asked: int | None) -> None:
    even = batch % ranks == 0 and (asked is None or (batch // ranks) % asked == 0)
    if not even:
        with pytest.raises(PlanError) as caught:
            micro_batches(batch, ranks, asked)
        assert caught.value.hint
        return
    sizes = micro_batches(batch, ranks, asked)
    assert sizes == sorted(sizes, reverse=True)
    assert all(batch == size * ranks * (batch // ranks // size) for size in sizes)
    if asked is None:
        assert sizes == [size for size in range(batch // ranks, 0, -1) if batch // ranks % size == 0]


def test_global_batch_is_micro_batch_x_ranks_x_accumulation() -> None:
    train = train_of(quickstart("train.data.batch_size=16", "train.data.micro_batch=2"), cpu())
    assert (train.global_batch, train.micro_batch, train.mesh.num_data_ranks, train.accumulation) == (
        16,
        2,
        2,
        4,
    )
    tokens = quickstart("train.data={tokens: x, batch_tokens: 4096}")
    assert train_of(tokens, cpu()).global_batch == 4096 // 256


@pytest.mark.parametrize(
    ("strategy", "nodes", "workers", "mesh"),
    [
        ("single", 1, 1, Mesh()),
        ("ddp", 2, 2, Mesh(dp_replicate=4)),
        ("zero1", 1, 2, Mesh(dp_replicate=2)),
        ("zero2", 1, 2, Mesh(dp_shard=2)),
        ("fsdp", 2, 2, Mesh(dp_shard=4)),
        ("fsdp", 1, 1, Mesh()),
        ("ddp", 1, 1, Mesh()),
        ("hsdp", 2, 2, Mesh(dp_replicate=2, dp_shard=2)),
    ],
)
def test_meshes(strategy: str, nodes: int, workers: int, mesh: Mesh) -> None:
    train = train_of(quickstart(f"train.strategy={strategy}"), cpu(workers, num_nodes=nodes))
    assert (train.strategy, train.mesh) == (strategy, mesh)
    assert train.reason.startswith(f"{strategy}: as asked")


def test_a_mesh_of_ones_own() -> None:
    own = ("train.mesh={dp_replicate: 2, dp_shard: 2}", "train.resources.workers_per_node=4")
    train = train_of(quickstart("train.strategy=hsdp", *own), cpu(4))
    assert train.mesh == Mesh(dp_replicate=2, dp_shard=2)
    with pytest.raises(PlanError, match="mesh dp_replicate 2 x dp_shard 2 is for 4 workers, but there are 2"):
        train_of(quickstart("train.strategy=hsdp", *own), cpu(2))


def test_the_exchange_of_keys_and_values_is_the_files_or_the_planners() -> None:
    """On a CPU nothing hides a round. What is as it always was is not written."""
    plans = [
        plan_of(quickstart("train.mesh={cp: 2}", f"train.context={{exchange: {asked}}}"), "train", cpu())
        for asked in ("auto", "all_gather", "ring")
    ]
    assert [plan.work.context_exchange for plan in plans] == ["all_gather", "all_gather", "ring"]
    assert ["context_exchange" in plan.to_json() for plan in plans] == [False, False, True]
    assert Plan.from_json(plans[2].to_json()) == plans[2]


@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("{dp_replicate: 2, dp_shard: fill}", "hsdp"),
        ("{dp_shard: fill}", "fsdp"),
        ("{dp_replicate: 4}", "ddp"),
    ],
)
def test_the_strategy_follows_from_a_mesh_that_is_named(mesh: str, strategy: str) -> None:
    own = (f"train.mesh={mesh}", "train.resources.workers_per_node=4")
    train = train_of(quickstart(*own), cpu(4))
    assert (train.strategy, train.mesh.world_size) == (strategy, 4)
    both = compare(quickstart(*own), "train", cpu(4))
    assert {c.mesh for c in both if c.asked} == {train.mesh}


@pytest.mark.parametrize(
    ("overrides", "workers", "message"),
    [
        (["train.strategy=single"], 2, "single is one worker, and there are 2"),
        (["train.strategy=hsdp"], 4, "hsdp shards within nodes and copies across them; 1 x 4 has not both"),
        (["train.data.batch_size=15"], 2, "a batch of 15 cannot be split evenly over 2 workers"),
        (
            ["train.data.batch_size=16", "train.data.micro_batch=3"],
            2,
            "micro_batch 3 does not divide the 8 sequences",
        ),
        (["train.model.seq_len=2048"], 2, "seq_len 2048 is more than the 1024 positions"),
        (["train.model.num_heads=3"], 2, "num_heads 3 does not divide dim 256"),
        (["train.model.num_kv_heads=3"], 2, "num_kv_heads 3 does not divide num_heads 4"),
    ],
)
def test_what_cannot_run_is_refused_with_a_hint(overrides: list[str], workers: int, message: str) -> None:
    with pytest.raises((PlanError, SpecErrors)) as caught:
        train_of(quickstart(*overrides), cpu(workers))
    assert message in str(caught.value)
    assert caught.value.kind == "input"


def test_unknown_stage() -> None:
    with pytest.raises(PlanError, match="no stage 'trian'"):
        plan_of(quickstart(), "trian", cpu())
    assert compare(quickstart(), "corpus", cpu()) == []


def test_auto_takes_the_fastest_that_fits() -> None:
    pipeline = load_pipeline(LLM, overrides=["train.model.preset=llama-1b"])
    hardware = stage_hardware(pipeline, "train")
    seen, fitting = [], []
    for gib in (400, 40, 24, 16, 4):
        small = hardware._replace(memory_bytes=gib * GIB)
        fits = [c for c in compare(pipeline, "train", small) if c.fits and c.asked]
        alone = [c for c in fits if c.mesh is not None and c.mesh.tp == c.mesh.cp == c.mesh.pp == 1]
        fitting.append({(c.strategy, c.mesh, c.micro_batch) for c in alone})
        if not fits:
            with pytest.raises(PlanError, match="no strategy fits: ddp: needs"):
                train_of(pipeline, small)
            seen.append(None)
            continue
        train = train_of(pipeline, small)
        chosen = next(c for c in fits if (c.strategy, c.mesh) == (train.strategy, train.mesh))
        fastest = min(fits, key=lambda c: c.step_seconds)
        assert fastest.memory is not None
        within = 1.05 if fastest.memory.total > 0.92 * small.memory_bytes else 1.02
        assert fastest.step_seconds >= chosen.step_seconds / within
        assert train.reason.startswith(f"{chosen.strategy}: needs ")
        seen.append(train.strategy)
    assert seen[-1] is None
    assert all(small <= large for large, small in itertools.pairwise(fitting))


def test_the_reason_is_in_words() -> None:
    reason = train_of(quickstart(), cpu()).reason
    assert reason.startswith("ddp: needs ")
    assert reason.endswith(" of 4.0 GiB per worker; none is faster, and nothing needs to be sharded")


def test_a_model_of_unknown_size_is_not_sharded_unless_asked() -> None:
    pipeline = load_pipeline(
        ROOT / "pipelines" / "custom" / "pipeline.yaml", overrides=["train.strategy=auto"]
    )
    train = train_of(pipeline, cpu())
    assert train.strategy == "ddp"
    assert "not known before it is built" in train.reason
    assert train.num_flops_per_token is None
    assert train.data.dataset is not None


def test_memory_decides_the_micro_batch() -> None:
    def size(memory_bytes: int) -> int:
        micro_batch: int = train_of(quickstart("train.data.batch_size=64"), cpu(2, memory_bytes)).micro_batch
        return micro_batch

    assert size(16 * GIB) == 32
    assert size(GIB) < 32
    assert size(GIB // 2 + 250 * 2**20) < size(GIB)


def test_evaluation_uses_the_resources_of_its_training_unless_it_has_its_own() -> None:
    assert stage_hardware(quickstart(), "evaluate").world_size == 2
    alone = quickstart("evaluate.resources.workers_per_node=3", "train.strategy=fsdp")
    hardware = stage_hardware(alone, "evaluate")
    assert hardware.world_size == 3
    plan = plan_of(alone, "evaluate", hardware)
    assert plan.work.training.strategy == "ddp"
    assert plan.work.training.accumulation == 1
    assert plan.work.training.global_batch == 3 * plan.work.training.micro_batch
    same = plan_of(quickstart("train.strategy=fsdp"), "evaluate", cpu())
    assert same.work.training.strategy == "fsdp"


def test_launch() -> None:
    launch = plan_of(quickstart("train.timeout=2 h", "train.metrics_port=off"), "train", cpu()).launch
    assert (launch.num_nodes, launch.nproc_per_node, launch.device) == (1, 2, "cpu")
    assert (launch.timeout_seconds, launch.metrics_port, launch.max_restarts) == (7200.0, None, 3)
    assert launch.env == {**glibc.environment(trimming=False), "OMP_NUM_THREADS": "2"}
    own = plan_of(quickstart("train.env.OMP_NUM_THREADS=7", "train.env.GLIBC_TUNABLES=mine"), "train", cpu())
    mine = {"OMP_NUM_THREADS": "7", "GLIBC_TUNABLES": "mine"}
    assert own.launch.env == {**glibc.environment(trimming=False), **mine}
    for saving in ("train.strategy=fsdp", "train.activation_checkpointing=full"):
        env = plan_of(quickstart(saving), "train", cpu()).launch.env
        assert env == {**glibc.environment(trimming=True), "OMP_NUM_THREADS": "2"}


def test_an_optimizer_is_named_or_the_users_own() -> None:
    momentum = train_of(quickstart("train.optimizer={name: sgd, lr: 1}"), cpu()).optimizer
    assert (momentum.name, momentum.entry, momentum.lr) == ("sgd", None, 1.0)
    assert (momentum.args, momentum.state_bytes_per_parameter) == ({"momentum": 0.9, "weight_decay": 0.0}, 4)
    plain = train_of(quickstart("train.optimizer={name: sgd, momentum: 0}"), cpu()).optimizer
    assert plain.state_bytes_per_parameter == 0
    own = train_of(quickstart('train.optimizer={entry: "a.b:c", args: {x: "{{store}}/y"}}'), cpu()).optimizer
    assert (own.name, own.entry, own.state_bytes_per_parameter) == (None, "a.b:c", 8)
    assert own.args["x"].endswith("/y")
    assert "{{" not in own.args["x"]


def test_what_stands_beside_an_optimizer() -> None:
    stated = (
        "{name: lion, groups: [{match: '*.bias', lr_scale: 2}, {match: x, weight_decay: 0}], clip_value: 0.5}"
    )
    train = train_of(quickstart(f"train.optimizer={stated}", "train.ema={decay: 0.9}"), cpu())
    assert train.optimizer.groups == (ParameterGroup("*.bias", 2.0, None), ParameterGroup("x", 1.0, 0.0))
    assert (train.optimizer.clip_value, train.optimizer.grad_clip) == (0.5, 0.0)
    assert train.ema == EmaPlan(0.9, 1)
    plain = train_of(quickstart(), cpu())
    assert (plain.ema, plain.optimizer.groups, plain.optimizer.grad_clip) == (None, (), 1.0)
    own = "{schedule: {entry: 'a.b:c', args: {x: '{{store}}/y'}}}"
    schedule = train_of(quickstart(f"train.optimizer={own}"), cpu()).optimizer
    assert schedule.schedule == "own"
    assert schedule.own_schedule is not None
    assert "{{" not in schedule.own_schedule.args["x"]
    power = train_of(quickstart("train.optimizer={schedule: polynomial, power: 2}"), cpu()).optimizer
    assert (power.schedule, power.power, power.own_schedule) == ("polynomial", 2.0, None)


def test_accumulation_is_stated_or_follows() -> None:
    for accumulation in (1, 2, 4):
        train = train_of(quickstart(f"train.accumulation={accumulation}"), cpu())
        assert train.accumulation == accumulation
        assert train.micro_batch * accumulation * train.mesh.num_data_ranks == train.global_batch
        assert train.smaller_micro_batches == ()
    with pytest.raises(PlanError, match="accumulation 4 does not divide the 2 sequences of each of 4"):
        plan_of(quickstart("train.accumulation=4"), "train", cpu(4))
    evaluation = plan_of(quickstart("train.accumulation=2"), "evaluate", cpu())
    assert evaluation.work.training.accumulation == 1


def test_an_average_is_measured_where_it_is_kept() -> None:
    kept = quickstart("train.ema={decay: 0.9}", "evaluate.weights=ema")
    assert plan_of(kept, "evaluate", cpu()).work.weights == "ema"
    with pytest.raises(PlanError, match="keeps no average"):
        plan_of(quickstart("evaluate.weights=ema"), "evaluate", cpu())


def test_what_an_optimizer_keeps_counts_in_memory_and_time() -> None:
    """SGD with momentum keeps half of AdamW's bytes, SGD without none."""
    chosen = ("{name: adamw}", "{name: sgd}", "{name: sgd, momentum: 0}")
    plans = [train_of(quickstart("train.strategy=ddp", f"train.optimizer={one}"), cpu()) for one in chosen]
    predicted = [plan.predicted for plan in plans if plan.predicted is not None]
    num_bytes = [one.memory_bytes for one in predicted]
    assert num_bytes[0] > num_bytes[1] > num_bytes[2]
    seconds = [one.step_seconds for one in predicted]
    assert seconds[0] > seconds[1] > seconds[2]


def test_a_step_of_adamw_moves_40_bytes_a_parameter() -> None:
    assert [traffic_bytes(state) for state in (8, 4, 0)] == [40, 32, 24]


def test_wsd_decays_over_a_tenth_unless_told() -> None:
    assert train_of(quickstart("train.optimizer.schedule=wsd"), cpu()).optimizer.decay_steps == 15
    told = quickstart("train.optimizer.schedule=wsd", "train.optimizer.decay_steps=7")
    assert train_of(told, cpu()).optimizer.decay_steps == 7
    assert train_of(quickstart(), cpu()).optimizer.decay_steps == 0


def test_hardware_from_resources() -> None:
    gpus = detect_hardware(Resources(nodes=2, gpus_per_node=8, gpu="H100-80GB", cpus=96))
    assert (gpus.device, gpus.world_size, gpus.cpus_per_node) == ("cuda", 16, 96)
    assert gpus.memory_bytes == 81_559 * 2**20
    assert gpus.peak_flops["bf16"] == 989e12
    assert str(gpus) == "2 nodes x 8 x H100-80GB"
    cpus = detect_hardware(Resources(workers_per_node=4, memory="8 GiB", cpus=4))
    assert (cpus.device, cpus.memory_bytes, cpus.peak_flops) == ("cpu", 2 * GIB, {})
    here = detect_hardware(None)
    assert here.world_size == 1
    assert here.cpus_per_node >= 1
    assert here.memory_bytes > 2**28
    with pytest.raises(PlanError, match="unknown GPU 'H1OO'") as caught:
        detect_hardware(Resources(gpus_per_node=1, gpu="H1OO"))
    assert "H100-80GB" in str(caught.value.hint)


RATES = KernelRates(1e11, ((1e6, 1.0),), 1e10, 1e10, 1e10)


def _measured(bf16_flops: float) -> Hardware:
    kernels = {"fp32": RATES, "bf16": dataclasses.replace(RATES, peak_flops=bf16_flops)}
    peaks = {name: rates.peak_flops for name, rates in kernels.items()}
    return cpu()._replace(speed=CPU_CORE._replace(kernels=kernels, peak_flops=peaks))


@pytest.mark.parametrize(
    ("hardware", "precision", "reason"),
    [
        (cpu(), "fp32", "no bf16 instructions are known of this CPU"),
        (cpu()._replace(native_bf16="amx_bf16"), "bf16", "this CPU has amx_bf16"),
        (_measured(2e11), "bf16", "bf16 was measured at 2 times the speed of fp32"),
        (_measured(5e10), "fp32", "bf16 was measured at 0.5 times the speed of fp32"),
        (detect_hardware(Resources(gpus_per_node=8, gpu="H200")), "bf16", "H200 computes it natively"),
        (
            detect_hardware(Resources(gpus_per_node=8, gpu="T4")),
            "fp16",
            "T4 has no bf16; the loss is scaled, since fp16 has a narrow range",
        ),
        (
            detect_hardware(
                Resources(gpus_per_node=8, gpu="P40", device=Device(memory="24 GiB", fp32_tflops=12))
            ),
            "fp32",
            "P40 has no bf16",
        ),
    ],
)  # fmt: skip
def test_precision_is_what_the_hardware_computes_natively(
    hardware: Hardware, precision: str, reason: str
) -> None:
    spec = quickstart("train.data.batch_size=16").stage("train").work
    assert spec is not None
    assert precision_on(spec, hardware) == (precision, reason)
    assert train_of(quickstart("train.data.batch_size=16"), hardware).precision == precision
    for asked in ("fp32", "bf16") if "bf16" in hardware.speed.peak_flops else ("fp32",):
        pipeline = quickstart("train.data.batch_size=16", f"train.precision={asked}")
        assert train_of(pipeline, hardware).precision == asked


def test_what_this_machine_can_do_decides_neither_elsewhere_nor_where_repeats_must_be_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n\nprocessor : 1\n")
    monkeypatch.setattr("mlpipe._core.cpus._CPUINFO", tmp_path / "cpuinfo")
    here, there = (stage_hardware(quickstart(), "train", cluster=cluster) for cluster in (False, True))
    assert train_of(quickstart(), here).precision == "bf16"
    assert train_of(quickstart(), there).precision == "fp32"
    assert train_of(quickstart("train.deterministic=true"), here).precision == "fp32"
    assert plan_of(quickstart(), "evaluate", here).work.training.precision == "bf16"
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512f\n")
    assert train_of(quickstart(), stage_hardware(quickstart(), "train")).precision == "fp32"
    (tmp_path / "cpuinfo").unlink()
    assert detect_hardware(None).native_bf16 is None


def test_no_bf16_where_the_card_has_none() -> None:
    pipeline = load_pipeline(LLM, overrides=["train.model.preset=llama-1m", "train.model.seq_len=512",
                                             "train.resources.gpu=V100"])  # fmt: skip
    with pytest.raises(PlanError, match="V100 has no bf16"):
        train_of(pipeline, stage_hardware(pipeline, "train"))


def test_peaks_are_dense_and_in_order() -> None:
    for gpu in GPUS.values():
        assert gpu.memory_bytes > 10 * GIB
        assert gpu.bf16 is None or gpu.fp32 < gpu.bf16 < 2.5e15
        assert gpu.network_bytes_per_second < gpu.link_bytes_per_second < gpu.memory_bytes_per_second


def test_every_figure_of_the_catalogue_has_its_source() -> None:
    found = json.loads(CATALOGUE.read_bytes())
    entries = [found["cpu_core"], *found["gpus"].values()]
    sources = {source for entry in entries for _, source in entry.values()}
    assert sources == found["sources"].keys()


def test_the_users_price_goes_before_the_catalogues() -> None:
    def price(*overrides: str) -> float | None:
        pipeline = load_pipeline(LLM, overrides=overrides)
        return plan_of(pipeline, "train", stage_hardware(pipeline, "train")).price_usd_per_device_hour

    assert price() == 2.5
    assert price("train.resources.price_usd_per_gpu_hour=0") == 0
    unpriced = "train.resources={nodes: 2, gpus_per_node: 8, gpu: H100-80GB}"
    assert price(unpriced) == GPUS["H100-80GB"].price_usd_per_hour == 2.99
    assert (
        plan_of(quickstart(), "train", stage_hardware(quickstart(), "train")).price_usd_per_device_hour
        is None
    )
    own = quickstart("train.resources.price_usd_per_gpu_hour=0.05")
    assert plan_of(own, "train", stage_hardware(own, "train")).price_usd_per_device_hour == 0.05


def test_a_gpu_described_in_the_spec() -> None:
    def resources(**device: Any) -> Resources:
        return Resources.model_validate({"gpus_per_node": 8, "gpu": "X1", "device": device})

    found = detect_hardware(resources(memory="64 GiB", fp32_tflops=50.0, bf16_tflops=200.0))
    assert (found.name, found.memory_bytes) == ("X1", 64 * GIB)
    assert found.peak_flops == {"fp32": 50e12, "bf16": 200e12, "fp16": 200e12}
    assert found.price_usd_per_device_hour is None
    with pytest.raises(PlanError, match="lacks fp32_tflops"):
        detect_hardware(resources(memory="64 GiB"))
    slower = Resources.model_validate(
        {"gpus_per_node": 1, "gpu": "H100-80GB", "device": {"memory": "94 GiB", "memory_gb_per_second": 2400}}
    )
    changed, known = detect_hardware(slower), GPUS["H100-80GB"]
    assert changed.memory_bytes == 94 * GIB
    assert changed.speed == known.speed._replace(memory_bytes_per_second=2.4e12)


def test_an_evaluation_needs_files_that_are_held_out() -> None:
    data = "{parquet: /data, columns: {inputs: text}, tokenizer: /data, batch_size: 8%s}"
    vocabulary = "train.model.vocab_size=4096"
    with pytest.raises(PlanError, match="'train' has no held-out files") as caught:
        plan_of(quickstart(f"train.data={data % ''}", vocabulary), "evaluate", cpu())
    assert "validation" in (caught.value.hint or "")
    held_out = quickstart(f"train.data={data % ', validation: /held'}", vocabulary)
    files = plan_of(held_out, "evaluate", cpu()).work.data.files
    assert files is not None
    assert (files.format, files.path, files.validation) == ("parquet", "/data", "/held")


GROUPED = """version: 1
name: g
stages:
- name: train
  train:
    model: {preset: llama-70b, seq_len: 4096}
    data: {tokens: ./tokens, batch_tokens: 1048576}
    steps: 10
  resources:
  - {nodes: 1, gpus_per_node: 1, gpu: H100-80GB}
  - {nodes: 2, gpus_per_node: 1, gpu: A100-40GB}
"""


def test_what_no_plan_can_do_is_told_with_its_line(tmp_path):
    """Of groups of machines by `validate`, too: all that the planner has to know is in the file."""
    path = tmp_path / "p.yaml"
    path.write_text(GROUPED)
    alone = ('train.resources={"nodes": 1, "gpus_per_node": 1, "gpu": "H100-80GB"}',)
    for overrides, where in (((), f"{path}:9:3"), (alone, f"--set {alone[0]}")):
        pipeline = load_pipeline(path, overrides=overrides)
        assert pipeline == load_pipeline_text(pipeline.resolved_yaml(), "elsewhere")
        with pytest.raises(PlanError, match="no strategy") as caught:
            plan_ahead(pipeline, "train", "", "r")
        assert caught.value.where == where
    told = validated(path)
    assert told.return_value == 2
    assert told.stdout.startswith(f"{path}:9:3: no strategy whose workers")
    path.write_text(GROUPED.replace("70b", "1b"))
    assert validated(path).return_value == 0


def validated(path: Path) -> Result:
    return CliRunner().invoke(validate, [str(path)], obj=CliSession(), standalone_mode=False)
