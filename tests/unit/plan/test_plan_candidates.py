"""Candidates: properties that hold whatever the hardware, the time model by hand, budgets and deadlines."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.shapes import rank_work

from mlpipe._core.errors import PlanError
from mlpipe._core.meshes import Strategy
from mlpipe._core.presets import PRESETS
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.allocators import allocation_seconds
from mlpipe.plan.axes import active
from mlpipe.plan.axes.axis import Passes
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.candidates import _validations, exchange_of, precision_on
from mlpipe.plan.choose import Candidate, choose, rank, verdict
from mlpipe.plan.hardware import CPU_CORE, GIB, GPUS, Hardware
from mlpipe.plan.kernels import Kernels, copy_seconds
from mlpipe.plan.measured import KernelRates
from mlpipe.plan.memory import rank_tensors
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.pricing import Choices, Pricer, Training, layout_of
from mlpipe.plan.reference import REFERENCE, reference_step
from mlpipe.plan.scaling import parse_nodes, scale_stage, within
from mlpipe.plan.shapes.dense import Dense, traffic_block, traffic_by_width
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.sizes import DDP_BUCKET_BYTES
from mlpipe.plan.strategies import ORDER, hsdp
from mlpipe.plan.time import offload_seconds, passes, save_seconds
from mlpipe.plan.training import compare
from mlpipe.plan.wire import Wire
from mlpipe.spec.load import load_pipeline
from mlpipe.spec.model import Pipeline
from mlpipe.spec.validate import Validate

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]


def gpus(name: str = "H100-80GB", num_nodes: int = 1, per_node: int = 8) -> Hardware:
    gpu = GPUS[name]
    speed = gpu.speed
    return Hardware(
        "cuda",
        num_nodes,
        per_node,
        gpu.memory_bytes,
        name,
        speed.peak_flops,
        96,
        speed,
        gpu.price_usd_per_hour,
    )


def llm(*overrides: str) -> Pipeline:
    return load_pipeline(ROOT / "pipelines" / "llm.yaml", overrides=overrides)


def of(found: list[Candidate], strategy: Strategy) -> list[Candidate]:
    return [c for c in found if c.strategy == strategy]


def is_named(mesh: Mesh) -> bool:
    """By a strategy: of other meshes not all are priced."""
    return mesh.num_data_ranks == 16 and mesh.ep == 1


def mesh_for(strategy: Strategy, ranks: int) -> Mesh:
    if strategy == "hsdp":
        return Mesh(dp_replicate=2, dp_shard=ranks // 2)
    return Mesh(dp_replicate=ranks) if strategy in ("ddp", "zero1") else Mesh(dp_shard=ranks)


@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 200), st.integers(1, 200))
@settings(max_examples=6, deadline=None)
def test_more_memory_never_makes_a_fitting_plan_unfit(preset: str, gib: int, more: int) -> None:
    pipeline = llm(f"train.model.preset={preset}", "train.model.seq_len=1024", "train.compile=off")
    small = gpus(num_nodes=2)._replace(memory_bytes=gib * GIB)
    large = small._replace(memory_bytes=(gib + more) * GIB)
    fits = [
        {c for c in compare(pipeline, "train", h) if c.fits and c.mesh and is_named(c.mesh)}
        for h in (small, large)
    ]
    keys = [
        {(c.strategy, c.mesh, c.micro_batch, c.activation_checkpointing, c.precision) for c in f}
        for f in fits
    ]
    assert keys[0] <= keys[1]


@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(["ddp", "zero1", "zero2", "fsdp", "hsdp"]),
    st.integers(2, 9),
    st.sampled_from(["fp32", "bf16"]),
    st.integers(1, 2),
)
def test_more_ranks_never_raise_the_bytes_of_a_rank(
    preset: str, strategy: Strategy, doubled: int, precision: str, accumulation: int
) -> None:
    sizes = Dense(PRESETS[preset]).parameters
    same: dict[str, Any] = {
        "precision": precision, "saved": 1000, "logits": 100, "accumulation": accumulation,
    }  # fmt: skip
    few, many = (
        rank_tensors(rank_work(sizes, strategy, mesh_for(strategy, ranks), **same))
        for ranks in (2**doubled, 2 ** (doubled + 1))
    )
    slices = sizes.share(2 ** (doubled + 1)) * 2 ** (doubled + 1) - sizes.total
    padding = 4 * slices if strategy == "zero1" else 0  # of its gathering buffers
    assert many.peak <= few.peak + padding


def test_flops_do_not_depend_on_the_strategy() -> None:
    found = compare(llm(), "train", gpus(num_nodes=2))
    tokens = {round(c.tokens_per_second * c.step_seconds) for c in found if c.tokens_per_second}
    assert tokens == {1_048_576}
    # what MFU, rate and peak say of the FLOPs of a token is the same for all
    for precision in ("fp32", "bf16"):
        peak = 16 * GPUS["H100-80GB"].speed.peak_flops[precision]
        mine = [c for c in found if c.precision == precision and c.mfu_ratio and c.tokens_per_second]
        flops = [
            c.mfu_ratio * peak / c.tokens_per_second for c in mine if c.mfu_ratio and c.tokens_per_second
        ]
        assert max(flops) == pytest.approx(min(flops))
        assert flops[0] == pytest.approx(57.9e9, rel=1e-3)


def test_every_strategy_shares_the_writing_of_a_checkpoint_among_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama-1b on 8 ranks: 12 bytes a parameter, an eighth of them a rank (torch/test_strategies.py weighs
    real checkpoints)."""
    saved: list[float] = []

    def spy(num_bytes: float, hardware: object, interval: object) -> float:
        saved.append(num_bytes)
        return 0.0

    monkeypatch.setattr("mlpipe.plan.pricing.save_seconds", spy)
    found = compare(llm("train.model.preset=llama-1b"), "train", gpus(num_nodes=1))
    assert {c.strategy for c in found if c.seconds} == {"ddp", "zero1", "zero2", "fsdp"}
    num_params = PRESETS["llama-1b"].num_params()
    assert saved == [pytest.approx(12 * num_params / 8, rel=1e-3)] * len(saved)


def test_units_of_time_and_cost_agree() -> None:
    best = compare(llm(), "train", gpus(num_nodes=2))[0]
    assert best.seconds is not None
    assert best.hours == pytest.approx(100_000 * best.step_seconds / 3600)
    assert best.usd == pytest.approx(2.99 * 16 * (best.hours or 0))
    assert best.usd_per_million_tokens == pytest.approx((best.usd or 0) / (100_000 * 1.048576))
    memory = best.memory
    assert memory is not None
    parts = memory._asdict()
    assert memory.total == sum(parts.values()) - 2 * parts["reused"]
    unpriced = compare(llm(), "train", gpus(num_nodes=2)._replace(price_usd_per_device_hour=None))
    assert {c.usd for c in unpriced} == {None}


def test_each_candidate_says_why_it_was_not_chosen() -> None:
    found = compare(llm("train.activation_checkpointing=auto"), "train", gpus(num_nodes=2))
    best, reason = choose(found)
    assert best.fits
    assert best.asked
    assert reason.startswith(f"{best.strategy}: needs ")
    words = {verdict(c, best) for c in found}
    assert "chosen" in words
    assert any(w.startswith("needs ") for w in words)
    assert any(w.startswith("not asked for: precision: fp32") for w in words)
    assert "single is one worker, and there are 16" in words
    assert rank(found)[0].fits
    assert {c.activation_checkpointing for c in found if c.asked} >= {"none", "selective", "full"}


def test_meshes_of_hsdp_within_and_across_nodes() -> None:
    assert len(hsdp.meshes(99_999, 99_999)) == 21  # at once: these are 10^10 GPUs
    assert [mesh.dp_shard for mesh in hsdp.meshes(6, 4) if isinstance(mesh, Mesh)] == [4, 2, 8, 12]
    shards = {c.mesh.dp_shard for c in of(compare(llm(), "train", gpus(num_nodes=4)), "hsdp") if c.mesh}
    assert shards == {2, 4, 8, 16}
    assert {c.mesh for c in of(compare(llm(), "train", gpus()), "hsdp")} == {None}


def _passes(**changes: object) -> Passes:
    plain = Passes(
        num_blocks=4,
        forward_block=1.0,
        backward_block=2.0,
        forward_outside=0.5,
        backward_outside=1.0,
        accumulation=1,
        block_params=10**9,
        outside_params=10**9,
        width=2,
        overlap=True,
    )
    return plain._replace(**changes)  # type: ignore[arg-type]


def exposed(name: Strategy, mesh: Mesh, wire: Wire, *, each: bool = False, **changes: object) -> float:
    """Seconds that computing does not hide."""
    layout = layout_of(name, mesh)
    if each:
        layout = layout._replace(reduce_gradients="every")
    return sum(axis.exposed_seconds(_passes(**changes), wire, layout) for axis in active(mesh))


def test_collectives_by_hand() -> None:
    """Ring: (n-1)/n of the bytes at 80 % of the slowest link, and a step's latency each."""
    wire = Wire(gpus())
    inside = wire.all_gather(8e9, 8)
    assert inside == pytest.approx(7e9 / (0.8 * 450e9) + 7 * 3.4e-6 + 8.4e-6)
    assert wire.all_reduce(8e9, 8) == pytest.approx(2 * inside)
    assert wire.all_gather(8e9, 1) == 0
    two = Wire(gpus(num_nodes=2))
    assert two.all_gather(16e9, 16) == pytest.approx(15e9 / (0.8 * 400e9) + 14 * 3.4e-6 + 14e-6 + 8.4e-6)
    # hsdp's copies: each of the 8 pairs has one port
    assert two.all_reduce(2e9, 2, stride=8) == pytest.approx(2 * (1e9 / (0.8 * 50e9) + 14e-6 + 8.4e-6))


def test_computing_hides_what_it_can() -> None:
    wire, eight = Wire(gpus()), Mesh(dp_shard=8)
    shown = {name: exposed(name, mesh_for(name, 8), wire) for name in ORDER if name != "single"}
    assert exposed("single", Mesh(), wire) == 0
    bucket = wire.all_reduce(DDP_BUCKET_BYTES, 8)
    # what is hidden takes its share of the GPU from what computes: all of ddp's, else what has a neighbour
    share = 24 / 132
    beside = share * wire.all_reduce(4 * 5e9, 8)
    assert shown["ddp"] == pytest.approx(bucket + beside)
    assert shown["zero1"] > shown["ddp"]
    bare = exposed("ddp", mesh_for("ddp", 8), wire, overlap=False)
    assert bare == pytest.approx(wire.all_reduce(4 * 5e9, 8))
    first, block = wire.all_gather(4e9, 8), wire.all_gather(2e9, 8)
    out = copy_seconds(2 * (2 * 4e9 + 4 * 1e9), gpus().speed)  # 4 blocks in bf16 and the rest in fp32, once
    into = copy_seconds(2 * 4 * 5e9, gpus().speed)  # all gradients in fp32
    scattered = wire.all_gather(4e9, 8)  # of a block's gradients
    forward, backward = share * 3 * block, share * 4 * scattered
    fsdp = 3 * first + block + 2 * out + into + forward
    assert shown["fsdp"] == pytest.approx(fsdp + backward + share * 4 * block)
    assert shown["zero2"] == pytest.approx(2 * first + block + out + into + forward + backward)
    # with nothing to hide behind all of it shows: 2 gathers a block and a reduction
    bare = exposed("fsdp", eight, wire, overlap=False)
    moved = 3 * first + 4 * (2 * block + wire.all_gather(4e9, 8))
    assert bare == pytest.approx(moved + 2 * out + into)
    several = exposed("fsdp", eight, wire, accumulation=3)
    gathered = 3 * (forward + share * 4 * block)
    assert several == pytest.approx(3 * (2 * first + block) + first + 6 * out + into + gathered + backward)
    every = exposed("fsdp", eight, wire, each=True, accumulation=3)
    assert every == pytest.approx(3 * (3 * first + block) + 6 * out + 3 * into + gathered + 3 * backward)
    # gathered once a step, whatever the number of microbatches
    assert exposed("zero2", eight, wire, accumulation=3) == pytest.approx(shown["zero2"])


def test_a_calibrated_cpu_gathers_and_scatters_at_its_own_rates() -> None:
    speed = CPU_CORE._replace(link_bytes_per_second=4e9, collective_seconds=1e-4)
    cpu = Hardware("cpu", 1, 2, GIB, "CPU worker", {}, 2, speed)
    assert Wire(cpu).reduce_scatter(8e9, 2) == Wire(cpu).all_reduce(8e9, 2)  # gloo's
    rates = {"gather_bytes_per_second": 1e9, "scatter_bytes_per_second": 5e8}
    wire = Wire(cpu._replace(speed=speed._replace(**rates)))
    assert wire.all_gather(2e9, 2) == pytest.approx(2 + 1e-4)
    assert wire.all_gather(2e9, 1) == 0
    # two gatherings of 4 blocks in bf16 and of the rest, one scattering in fp32; copies are in the rates
    moved = [*8 * [2.0], *2 * [4.0], *4 * [8.0], 8.0]
    fsdp = exposed("fsdp", Mesh(dp_shard=2), wire, overlap=False)
    assert fsdp == pytest.approx(sum(moved) + len(moved) * 1e-4)
    two = Mesh(dp_replicate=2)
    zero1, ddp = exposed("zero1", two, wire), exposed("ddp", two, wire)
    assert zero1 - ddp == pytest.approx(20 + 1e-4)


def test_a_calibrated_cpu_streams_large_tensors_at_their_own_rate() -> None:
    """What a core's caches do not hold. Of 2,048 tokens 256 channels are 2 MiB, 128 one."""
    rates = KernelRates(1e11, ((1e9, 1.0),), 1e11, 10e9, 10e9)
    speed = CPU_CORE._replace(peak_flops={"fp32": 1e11}, kernels={"fp32": rates})
    cpu = Hardware("cpu", 1, 1, GIB, "CPU worker", {}, 1, speed)
    traffic = traffic_by_width(256, 128, 704)
    assert sum(num_bytes for _, num_bytes in traffic) == traffic_block(256, 128, 704)
    every = 2048 * traffic_block(256, 128, 704)
    assert Kernels("fp32", False, "cpu", cpu.speed).between(2048, traffic) == pytest.approx(every / 10e9)
    slow = dataclasses.replace(rates, large_bytes_per_second=5e9)
    cpu = cpu._replace(speed=speed._replace(kernels={"fp32": slow}))
    small = 2048 * 38 * 128
    assert Kernels("fp32", False, "cpu", cpu.speed).between(2048, traffic) == pytest.approx(
        small / 10e9 + (every - small) / 5e9
    )
    # recomputing a block ends before its last matmul
    shape, step = Dense(PRESETS["llama-4m"]), StepShape(256, 8, 1, "fp32", "none", compiled=False)
    plain, full = (passes(shape, step._replace(checkpointing=mode), cpu) for mode in ("none", "full"))
    down = 2.0 * 2048 * 704 * 256 / 1e11
    assert full.backward_block - plain.backward_block == pytest.approx(plain.forward_block - down)


def test_whole_passes_of_the_reference_model_scale_the_kernels() -> None:
    rates = KernelRates(1e11, ((1e9, 1.0),), 1e11, 10e9, 10e9)
    speed = CPU_CORE._replace(peak_flops={"fp32": 1e11}, kernels={"fp32": rates})
    cpu = Hardware("cpu", 1, 1, GIB, "CPU worker", {}, 1, speed)
    reference = REFERENCE["cpu"], reference_step("cpu", "fp32")
    twice = dataclasses.replace(rates, passes_seconds=2 * passes(*reference, cpu).compute)
    slower = cpu._replace(speed=speed._replace(kernels={"fp32": twice}))
    other = Dense(PRESETS["llama-25m"]), StepShape(512, 2, 3, "fp32", "full", compiled=True)
    for shape, step in (reference, other):
        told = passes(shape, step, slower).compute
        assert told == pytest.approx(2 * passes(shape, step, cpu).compute)


def test_what_spares_memory_pays_for_new_memory() -> None:
    """Of a block of llama-4m and 2,048 tokens those of its width (2 MiB) and of the MLP's are large; k, v and
    what the rotation halves are not."""
    speed = CPU_CORE._replace(new_tensor_seconds=1.0)
    cpu = Hardware("cpu", 1, 2, 8 * GIB, "CPU worker", {}, 2, speed)

    def seconds(mesh: Mesh, checkpointing: str, hardware: Hardware = cpu) -> float:
        step = StepShape(256, 8, 3, "fp32", checkpointing, compiled=False)
        made = Dense(PRESETS["llama-4m"]).activations(step, hardware.device).made
        return allocation_seconds(made, hardware.device, hardware.speed, mesh, checkpointing)

    assert seconds(Mesh(dp_shard=2), "none") == 4 * (30 + 9 + 8)
    assert seconds(Mesh(), "full") == 4 * (47 + 9 + 2 + 4)
    assert seconds(Mesh(dp_replicate=2), "none") == 0
    assert seconds(Mesh(dp_shard=2), "none", cpu._replace(device="cuda")) == 0
    quickstart = load_pipeline(ROOT / "pipelines" / "quickstart.yaml", overrides=["train.model.seq_len=1024"])
    never = cpu._replace(speed=CPU_CORE)
    found, before = (compare(quickstart, "train", hardware) for hardware in (cpu, never))
    more = {
        (c.strategy, c.micro_batch, c.activation_checkpointing): c.step_seconds - other.step_seconds
        for c in found
        for other in before
        if (c.mesh, c.strategy, c.micro_batch, c.activation_checkpointing)
        == (other.mesh, other.strategy, other.micro_batch, other.activation_checkpointing)
    }
    paying = {key[0] for key, seconds in more.items() if seconds > 1}
    assert {"zero2", "fsdp"} <= paying
    assert all(
        seconds == 0 for key, seconds in more.items() if key[0] in ("ddp", "zero1") and key[2] == "none"
    )


def test_a_slow_store_is_waited_for() -> None:
    """8 ranks of 1 GB each through 1 GB/s take 8 s, of which the training hides what lies between saves."""
    fast = gpus()
    slow = fast._replace(speed=fast.speed._replace(store_bytes_per_second=1e9))
    copying = save_seconds(1e9, fast, None)
    assert copying == pytest.approx(0.05)
    assert save_seconds(1e9, slow, 5.0) == pytest.approx(copying + 3.0)
    assert save_seconds(1e9, slow, 8.0) == copying
    assert save_seconds(1e9, slow, None) == pytest.approx(copying + 8.0)  # not asynchronous


def test_the_roofline_by_hand() -> None:
    """One matmul of llama-8b is compute bound at 16,384 tokens, memory bound at one."""
    config = PRESETS["llama-8b"]
    step = StepShape(8192, 2, 1, "bf16", "none", compiled=True)

    def of(**changes: Any) -> Passes:
        return passes(Dense(config), step._replace(**changes), gpus())

    found = of()
    matmuls = 2 * 16_384 * (config.num_layer_params() - 2 * config.dim)
    least = matmuls / (989e12 * 0.803)
    assert least < found.forward_block < 2 * least
    full = of(checkpointing="full")
    selective = of(checkpointing="selective")
    assert full.backward_block == pytest.approx(found.backward_block + found.forward_block, rel=0.02)
    assert found.compute < selective.compute < full.compute
    eager = of(compiled=False)
    assert eager.compute > found.compute
    tiny = of(seq_len=1, micro_batch=1)
    weights = 2 * (config.num_layer_params() - 2 * config.dim)
    assert tiny.forward_block > weights / 3.35e12


def test_nodes() -> None:
    assert parse_nodes("1..8") == [1, 2, 4, 8]
    assert parse_nodes("3..10") == [3, 6, 10]
    assert parse_nodes("4") == [4]
    for bad in ("", "0", "4..1", "a..b", "1..", "1..4096"):
        with pytest.raises(PlanError) as caught:
            parse_nodes(bad)
        assert caught.value.hint


def test_budget_and_deadline() -> None:
    pipeline = llm()
    rows = scale_stage(pipeline, "train", stage_hardware(pipeline, "train"), "1..64")
    assert [row.num_nodes for row in rows] == [1, 2, 4, 8, 16, 32, 64]
    fsdp = scale_stage(llm("train.strategy=fsdp"), "train", stage_hardware(pipeline, "train"), "32")
    assert "cannot be split evenly over 256" in fsdp[0].note
    able = [row for row in rows if row.best]
    hours = [row.best.hours or math.inf for row in able if row.best]
    assert hours == sorted(hours, reverse=True)
    soon, why = within(rows, None, 3600 * hours[2] * 1.01)
    assert soon.best is not None
    assert (soon.best.hours or 0) <= hours[2] * 1.01
    assert "the cheapest that is done in time" in why
    usd = [row.best.usd or 0 for row in able if row.best]
    cheap, why = within(rows, max(usd), None)
    assert (cheap.num_nodes, "the fastest within the budget" in why) == (64, True)
    with pytest.raises(PlanError) as caught:
        within(rows, min(usd) / 2, None)
    assert "the cheapest, " in str(caught.value.hint)
    assert "50% of the steps" in str(caught.value.hint)
    with pytest.raises(PlanError) as caught:
        within(rows, None, 3600 * min(hours) / 4)
    assert "25% of the steps" in str(caught.value.hint)


def test_gradients_are_reduced_after_every_microbatch_only_where_whole_ones_do_not_fit() -> None:
    found = compare(llm(), "train", gpus(num_nodes=2))
    assert all(c.reduce_gradients == "last" for c in found if c.strategy in ("ddp", "zero1", "single"))
    every = [c for c in found if c.reduce_gradients == "every"]
    for c in every:
        assert c.mesh is not None
        assert c.memory is not None
        assert c.mesh.num_data_ranks * (c.micro_batch or 0) < 128  # several microbatches
        whole = 1.08 * 4 * PRESETS["llama-8b"].num_params()  # with its share of the slack
        assert c.memory.total + whole > gpus().memory_bytes
    assert choose(found)[0] in every


def test_validations_are_of_the_runs_time_and_of_no_steps() -> None:
    """Ten of 100 samples on 8 ranks with 4 at a time: four forward passes each."""
    shape, hardware = Dense(PRESETS["llama-125m"]), gpus()
    plain = Training(64, 128, 100, False, OptimizerCost(8, "adamw"), 50, None)
    validated = plain._replace(num_validations=10, validation_samples=100)
    choices, mesh = Choices(4, "none", "bf16"), Mesh(dp_shard=8)
    without, with_them = (
        Pricer(shape, training, hardware).candidate("fsdp", mesh, choices, asked=True)
        for training in (plain, validated)
    )
    assert with_them.step_seconds == without.step_seconds
    step = StepShape(128, 4, 2, "bf16", "none", compiled=False)
    assert with_them.hours is not None
    assert without.hours is not None
    extra = 3600 * (with_them.hours - without.hours)
    assert extra == pytest.approx(10 * 4 * passes(shape, step, hardware).forward)
    train = llm().stage("train").part(Train)
    assert train is not None
    asked = Validate.model_construct(every="100 steps", max_tokens=10 * train.model.seq_len)
    told = _validations(train.model_copy(update={"validate_": asked, "steps": 250}))
    assert told == {"num_validations": 3, "validation_samples": 10}


def test_waiting_on_the_host_costs_what_the_link_and_the_cpus_take() -> None:
    def found(offload: str | None) -> Candidate:
        settings = ["train.activation_checkpointing=full", "train.compile=off", "train.strategy=fsdp"]
        settings.append("train.data.micro_batch=4")
        pipeline = llm(*settings, *([f"train.offload={offload}"] if offload else []))
        return next(c for c in compare(pipeline, "train", gpus()) if c.asked)

    plain, moved, host, both = (found(what) for what in (None, "activations", "optimizer", "all"))
    for one in (plain, moved, host, both):
        assert one.memory is not None
        assert one.seconds is not None
    assert moved.memory.activations < plain.memory.activations
    assert moved.memory.optimizer == plain.memory.optimizer
    assert (host.memory.optimizer, host.memory.activations) == (0, plain.memory.activations)
    assert (both.memory.optimizer, both.memory.activations) == (0, moved.memory.activations)
    assert plain.host_bytes == 0 < moved.host_bytes
    assert host.host_bytes == 2 * plain.memory.optimizer  # with as many bytes of weights and gradients
    assert both.host_bytes == moved.host_bytes + host.host_bytes
    # a block's copy hides beside a block of this size
    assert moved.seconds.total == plain.seconds.total
    assert host.seconds.compute > plain.seconds.compute


def test_float8_spares_time_of_the_blocks_products_where_it_is_known() -> None:
    """Compiled; in eager mode the kernels that round operands eat it."""
    settings = ["train.strategy=fsdp", "train.data.micro_batch=4", "train.activation_checkpointing=full"]
    settings.append("train.compile=block")

    def found(*more: str, on: str = "H100-80GB") -> Candidate:
        return next(c for c in compare(llm(*settings, *more), "train", gpus(on)) if c.asked)

    plain, low = found(), found("train.float8=true")
    assert plain.seconds is not None
    assert low.seconds is not None
    assert 0.7 * plain.seconds.compute < low.seconds.compute < 0.9 * plain.seconds.compute
    assert low.memory == plain.memory
    eager = [found("train.compile=off", f"train.float8={low}").seconds for low in ("false", "true")]
    assert eager[0] is not None
    assert eager[1] is not None
    assert eager[1].compute > eager[0].compute
    assert GPUS["H100-80GB"].float8_speedup == GPUS["H200"].float8_speedup == 1.767
    with pytest.raises(PlanError, match="no float8 of A100-80GB is known") as caught:
        found("train.float8=true", on="A100-80GB")
    assert "one of B200, H200, H100-80GB" in str(caught.value.hint)
    with pytest.raises(PlanError, match="stands beside bf16, and precision is fp16 on V100"):
        found("train.float8=true", "train.precision=auto", on="V100")
    spec = llm("train.float8=true", "train.precision=auto").stage("train").part(Train)
    assert spec is not None
    assert precision_on(spec, gpus()._replace(device="cpu"))[0] == "bf16", "emulated"


def test_what_must_repeat_to_the_bit_gathers_keys_and_values_whatever_is_cheaper() -> None:
    for deterministic, context, found in [
        ("false", "null", "auto"),
        ("true", "null", "all_gather"),
        ("true", "{exchange: ring}", "ring"),
    ]:
        sets = ("mesh={dp_shard: fill, cp: 4}", f"context={context}", f"deterministic={deterministic}")
        spec = llm(*(f"train.{one}" for one in sets)).stage("train").part(Train)
        assert spec is not None
        assert exchange_of(spec) == found


def test_a_fused_head_takes_less_memory_and_hardly_more_time() -> None:
    settings = ["train.strategy=fsdp", "train.data.micro_batch=4", "train.compile=off"]
    pipelines = [llm(*settings), llm(*settings, "train.loss=fused")]
    plain, fused = (next(c for c in compare(one, "train", gpus()) if c.asked) for one in pipelines)
    for one in (plain, fused):
        assert one.memory is not None
        assert one.seconds is not None
    assert fused.memory.logits < plain.memory.logits / 2
    assert fused.memory.total < plain.memory.total
    assert plain.seconds.compute < fused.seconds.compute < 1.05 * plain.seconds.compute


def test_copies_that_computing_does_not_hide_are_exposed() -> None:
    hardware = gpus()
    slow = hardware._replace(speed=hardware.speed._replace(host_bytes_per_second=1e9))
    step_passes = Passes(5, 0.1, 0.5, 0.0, 0.0, 2, 0, 0, 2, overlap=True)
    assert offload_seconds(0, step_passes, slow) == 0.0
    # four blocks, 0.25 s each way: 0.15 s of it show in the forward pass, and none behind the backward's
    assert offload_seconds(10**9, step_passes, slow) == pytest.approx(2 * 4 * 0.15)
    own = slow._replace(speed=slow.speed._replace(host_bytes_per_second=0.0))
    twice = 2 * 2 * copy_seconds(2 * 10**9, own.speed)
    assert offload_seconds(10**9, step_passes, own) == pytest.approx(twice)
