"""Bytes against hand counts: of parameters to the byte, of strategies by the formulas of ZeRO."""

from __future__ import annotations

from typing import Any

import pytest
from kit.shapes import rank_work

from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.plan import allocators
from mlpipe.plan.allocators import gloo
from mlpipe.plan.memory import MemoryEstimate, estimate, rank_tensors, saved_bytes
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.optimizers import OptimizerCost
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.frozen import Adapted
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.tensors import total

pytestmark = pytest.mark.unit
# V 10, D 4, L 2, 2 query heads and 1 key/value head of 2 channels, F 6
TINY = LlamaConfig(10, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, True)
BLOCK = 2 * (4 * 4) + 2 * (4 * 2) + 3 * (4 * 6) + 2 * 4  # q o, k v, gate up down, two norms
SIZES_1B = Dense(PRESETS["llama-1b"]).parameters
SIZES = Dense(TINY).parameters  # 300 in all, 128 a block, 44 outside


def test_a_tiny_model_by_hand() -> None:
    assert TINY.num_layer_params() == BLOCK == 128
    assert TINY.num_embedding_params() == 40
    assert TINY.num_params() == 40 + 2 * 128 + 4 == 300
    untied = LlamaConfig(10, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, False)
    assert untied.num_params() == 340
    sizes = Dense(untied).parameters
    assert (sizes.total, sizes.block, sizes.outside) == (340, 128, 84)


# "num_parameters" that Hugging Face prints for the four published models
@pytest.mark.parametrize(
    ("preset", "num_params"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-3b", 3_212_749_824),
        ("llama-8b", 8_030_261_248),
        ("llama-70b", 70_553_706_496),
    ],
)
def test_published_sizes(preset: str, num_params: int) -> None:
    assert PRESETS[preset].num_params() == num_params


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_sound_and_as_large_as_their_name(name: str) -> None:
    config = PRESETS[name]
    assert config.conflicts() == []
    size = {"moe-8x7b": "46.7b"}.get(name, name.partition("-")[2])  # all but the feed-forwards is there once
    stated = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert 0.9 < config.num_params() / stated < 1.25


def test_of_experts_a_token_meets_those_that_its_model_says() -> None:
    """Published: Mixtral 8x7B 46.7 and 12.9 billion, OLMoE 6.9 and 1.3, DeepSeekMoE 16.4 and 2.8."""
    active = {name: PRESETS[name].num_active_params() / 1e9 for name in ("moe-8x7b", "moe-7b", "moe-16b")}
    assert active == pytest.approx({"moe-8x7b": 12.88, "moe-7b": 1.28, "moe-16b": 2.83}, abs=0.01)
    for name in ("llama-1m", "moe-2m", "moe-16b"):
        config = PRESETS[name]
        assert sum(rows * columns * n for rows, columns, n in config.tensors()) == config.num_params()


def test_shapes_that_make_no_model() -> None:
    assert LlamaConfig(10, 5, 2, 2, 1, 6, 8, 1e4, 1e-5, True).conflicts()
    assert LlamaConfig(10, 6, 2, 2, 1, 6, 8, 1e4, 1e-5, True).conflicts()
    assert LlamaConfig(10, 8, 2, 4, 3, 6, 8, 1e4, 1e-5, True).conflicts()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_states_follow_zero(ranks: int) -> None:
    """fp32 throughout, 16 bytes a parameter: ddp all, zero1 8 + 8/N, fsdp 16/N (Rajbhandari et al. 2020)."""
    sizes = Dense(PRESETS["llama-8m"]).parameters
    n = sizes.total
    share = -(-n // ranks)
    states = {}
    for name, mesh in {
        "ddp": Mesh(dp_replicate=ranks),
        "zero1": Mesh(dp_replicate=ranks),
        "zero2": Mesh(dp_shard=ranks),
        "fsdp": Mesh(dp_shard=ranks),
    }.items():
        tensors = rank_tensors(rank_work(sizes, name, mesh))  # type: ignore[arg-type]
        states[name] = total((*tensors.parameters, *tensors.gradients, *tensors.optimizer))
        assert tensors.peak == states[name] + tensors.buffers
    assert states == {"ddp": 16 * n, "zero1": 8 * n + 8 * share, "zero2": 16 * share, "fsdp": 16 * share}


def test_replicas_of_shards_change_no_bytes() -> None:
    both = rank_tensors(rank_work(SIZES, "hsdp", Mesh(dp_replicate=4, dp_shard=2), saved=1000))
    assert both == rank_tensors(rank_work(SIZES, "fsdp", Mesh(dp_shard=2), saved=1000))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "fsdp"])
def test_one_worker_is_one_worker_by_any_name(strategy: str) -> None:
    alone = rank_tensors(rank_work(SIZES, saved=1000, logits=100))
    assert rank_tensors(rank_work(SIZES, strategy, saved=1000, logits=100)) == alone  # type: ignore[arg-type]


def test_buffers_by_hand() -> None:
    def buffers(strategy: str, mesh: Mesh, precision: str = "fp32") -> int:
        return rank_tensors(rank_work(SIZES, strategy, mesh, precision=precision)).buffers  # type: ignore[arg-type]

    three, replicas = Mesh(dp_shard=3), Mesh(dp_replicate=3)
    assert buffers("single", Mesh()) == 0
    assert buffers("single", Mesh(), "bf16") == buffers("ddp", replicas, "bf16") == 2 * 300
    assert buffers("zero1", replicas) == 4 * 4 * SIZES.share(3)
    # two blocks gathered, what is outside gathered with its gradients, a block's gradients and their copy
    assert buffers("fsdp", three) == 4 * 256 + 8 * 44 + 8 * 128
    assert buffers("fsdp", three, "bf16") == 2 * 256 + 8 * 44 + 6 * 128
    assert buffers("zero2", three, "bf16") == 2 * 256 + 8 * 44 + 6 * 128


def test_gradients_take_the_place_of_activations_where_one_rank_is_alone() -> None:
    """The larger of the moment of the loss and the end of the backward pass, beside weights and states."""

    def peak(saved: int, logits: int, backward: int = 0, **more: int) -> int:
        tensors = rank_tensors(rank_work(SIZES, saved=saved, logits=logits, backward=backward, **more))  # type: ignore[arg-type]
        return tensors.peak - 12 * 300

    assert peak(5000, 300) == 5300
    assert peak(700, 300) == 4 * 300
    assert peak(700, 300, 90) == 4 * 300 + 90
    assert peak(5000, 300, 900) == 5900
    assert peak(5000, 300, accumulation=2) == 5300 + 4 * 300
    ddp = rank_work(SIZES, "ddp", Mesh(dp_replicate=2), saved=5000, logits=300)
    assert rank_tensors(ddp).peak == 16 * 300 + 5300  # its buckets live from the first step on
    # so do those of ranks that have parts of the same sequences, and nothing in shards
    of_cp = [rank_work(SIZES, "ddp", Mesh(dp_replicate=n, cp=2), saved=5000, logits=300) for n in (1, 2)]
    assert rank_tensors(of_cp[0]).peak == rank_tensors(of_cp[1]).peak


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp_replicate=2), Mesh(dp_replicate=2, cp=2)])
def test_copies_of_weights_beside_adapters(mesh: Mesh, checkpointing: Any) -> None:
    """In the forward pass of all that is trained; where only adapters are, of a block. What is told is
    never less than nothing."""
    shape = Dense(PRESETS["llama-1b"])
    step = StepShape(64, 1, 1, "bf16", checkpointing, compiled=False)
    copies = {}
    for one in (shape, Adapted(shape, (), 8)):
        work = rank_work(one.parameters, "ddp" if mesh.world_size > 1 else "single", mesh)
        work = work._replace(step=step, activations=one.activations(step, "cuda"))
        told = estimate(work, "cuda")
        assert told.reused >= 0
        assert told.tensors == rank_tensors(work).peak
        copies[one] = told.tensors - told.parameters - told.gradients - told.optimizer
    if checkpointing == "full":
        # of a rank that is alone gradients take their place
        assert mesh.world_size == 1 or copies[shape] > 2 * SIZES_1B.total
        assert copies[Adapted(shape, (), 8)] < 0.5 * SIZES_1B.total


def test_gloo_gathers_updated_slices_into_one_flat_tensor_more_when_activations_are_gone() -> None:
    replicas = Mesh(dp_replicate=3)
    share = SIZES.share(3)
    buffers = 4 * 4 * share
    for saved, more in ((0, 12 * share), (1000, 12 * share), (9000, 9000)):
        tensors = rank_tensors(rank_work(SIZES, "zero1", replicas, saved=saved, overlap=False))
        assert tensors.peak == 8 * 300 + 8 * share + buffers + saved
        cloned = gloo.with_clones(tensors)
        assert cloned.peak == 8 * 300 + 8 * share + buffers + more
        assert cloned.buffers == buffers + 12 * share
    large = Dense(PRESETS["llama-125m"]).parameters
    tensors = rank_tensors(rank_work(large, "zero1", replicas, overlap=False))
    assert gloo.with_clones(tensors).peak - tensors.peak == 64 * 2**20  # a bucket at a time


def test_the_peak_of_fsdp_on_a_cpu_is_that_of_one_moment() -> None:
    states, two = 12 * SIZES.share(2), Mesh(dp_shard=2)

    def peak(strategy: str, saved: int, logits: int, backward: int = 0) -> int:
        work = rank_work(
            SIZES,
            strategy,
            two,
            saved=saved,
            logits=logits,
            backward=backward,
            overlap=False,  # type: ignore[arg-type]
        )
        return gloo.with_clones(rank_tensors(work)).peak - states

    # the loss: what is outside is gathered, the last block's buffer left; zero2 has all blocks
    assert peak("fsdp", 9000, 9000) == 18_000 + 4 * 44 + 4 * 128
    assert peak("zero2", 9000, 9000) == 18_000 + 4 * 44 + 4 * 128 + 4 * 256
    # the last block's backward: two gathered, and the head's gradients
    assert peak("fsdp", 9000, 0, backward=9000) == 18_000 + 8 * 44 + 2 * 4 * 128
    assert peak("zero2", 9000, 0, backward=9000) == 18_000 + 8 * 44 + 4 * 256  # all stay gathered
    # its reduction: half of the activations are gone, its gradients there, as sent and as gloo clones them
    assert peak("fsdp", 1000, 0) == 500 + 8 * 44 + 4 * 128 + 3 * 4 * 128
    # the last reduction: all gradients, of what is outside also whole, as sent and as gloo clones it
    wide = Dense(LlamaConfig(1000, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, True)).parameters
    tensors = rank_tensors(rank_work(wide, "fsdp", two, overlap=False))
    assert gloo.with_clones(tensors).peak == 16 * wide.share(2) + 4 * 4 * wide.outside
    assert gloo.with_clones(tensors).buffers == tensors.buffers + 4 * wide.outside


def test_a_gpu_has_all_of_fsdps_buffers_at_once() -> None:
    work = rank_work(SIZES, "fsdp", Mesh(dp_shard=2), saved=900, logits=90)
    assert rank_tensors(work).peak == 16 * SIZES.share(2) + 990 + rank_tensors(work).buffers


def test_an_estimate_adds_up() -> None:
    one = MemoryEstimate(1000, 200, 30, 4000, 500, 60, context=10_000, slack=7, reused=90)
    assert one.tensors == 1000 + 200 + 30 + 4000 + 500 + 60 - 90
    assert one.total == one.tensors + 10_007
    assert one.scaled(1.0) == one
    for ratio in (0.5, 1.5, 2):
        assert one.scaled(ratio).total == pytest.approx(ratio * one.total, abs=1)
        assert one.scaled(ratio).tensors == one.tensors
    for device in ("cpu", "cuda"):
        work = rank_work(SIZES, "fsdp", Mesh(dp_shard=2), saved=900, logits=90, accumulation=2)
        told = estimate(work._replace(overlap=device == "cuda"), device)
        assert (told.parameters, told.optimizer) == (4 * SIZES.share(2), 8 * SIZES.share(2))
        assert told.gradients == 4 * SIZES.share(2) + 4 * 300
        assert (told.activations, told.logits) == (900, 90)
        assert told.tensors == gloo.with_clones(rank_tensors(work._replace(overlap=device == "cuda"))).peak
    for device, checkpointing in (("cpu", "none"), ("cpu", "full"), ("cuda", "none")):
        work = rank_work(SIZES, "ddp", Mesh(dp_replicate=2), saved=900)
        work = work._replace(step=work.step._replace(checkpointing=checkpointing))
        reserved = allocators.reserve(rank_tensors(work), device, work.layout.mesh, checkpointing)
        told = estimate(work, device)
        assert (told.context, told.slack) == (reserved.context, reserved.slack)


def test_accumulation_keeps_whole_gradients_under_fsdp() -> None:
    several = rank_work(SIZES, "fsdp", Mesh(dp_shard=4), accumulation=2)
    assert total(rank_tensors(several).unsent) == 4 * 300
    at_once = several._replace(layout=several.layout._replace(reduce_gradients="every"))
    assert rank_tensors(at_once).unsent == ()
    assert rank_tensors(several).peak - rank_tensors(at_once).peak == 4 * 300
    for tensors in (rank_tensors(several), rank_tensors(at_once)):
        assert total(tensors.gradients) == 4 * 93


def test_states_of_any_width_are_counted() -> None:
    """Of an optimizer with 4, 2 or 9 bytes of state a parameter."""
    for state_bytes in (4, 2, 9):
        work = rank_work(SIZES, "zero1", Mesh(dp_replicate=4))._replace(optimizer=OptimizerCost(state_bytes))
        assert total(rank_tensors(work).optimizer) == state_bytes * SIZES.share(4)
        assert len(rank_tensors(work).optimizer) == len(SIZES.tensors) * -(-state_bytes // 4)


def test_what_a_rank_saves_is_its_part_of_what_all_hold_once() -> None:
    """llama-1b on 8 ranks: 1.73 GiB of weights and AdamW's moments."""
    sizes = Dense(PRESETS["llama-1b"]).parameters
    assert saved_bytes(sizes, OptimizerCost(8), 8) / 2**30 == pytest.approx(1.73, abs=0.005)
    assert saved_bytes(sizes, OptimizerCost(2), 1) == 6 * sizes.total


def test_what_waits_on_the_host_is_not_on_the_gpu_and_a_cpu_is_its_own_host() -> None:
    def step(offloads: bool) -> StepShape:
        return StepShape(2048, 2, 1, "bf16", "full", compiled=False, offloads=offloads)

    shape = Dense(PRESETS["llama-1b"])
    one_input, layers = 4 * 2 * 2048 * shape.config.dim, shape.config.num_layers
    kept, away = (shape.activations(step(offloads), "cuda") for offloads in (False, True))
    assert (kept.offloaded_bytes, away.offloaded_bytes) == (0, (layers - 1) * one_input)
    # one is used while the next one comes back
    assert total(kept.saved) - total(away.saved) == (layers - 2) * one_input
    assert away._replace(saved=kept.saved, offloaded_bytes=0) == kept
    on_cpu = [total(shape.activations(step(offloads), "cpu").saved) for offloads in (False, True)]
    assert on_cpu[0] == on_cpu[1]
    work = rank_work(SIZES, "fsdp", Mesh(dp_shard=2))
    host = work._replace(optimizer=work.optimizer._replace(on_host=True), overlap=True)
    assert total(rank_tensors(host).optimizer) == 0
    assert total(rank_tensors(host._replace(overlap=False)).optimizer) == 8 * SIZES.share(2)
    averaged = host._replace(optimizer=host.optimizer._replace(averages=True))
    assert total(rank_tensors(averaged).optimizer) == 4 * SIZES.share(2)
    # a checkpoint has them all the same
    assert saved_bytes(SIZES, host.optimizer, 2) == saved_bytes(SIZES, work.optimizer, 2)


def test_a_fused_head_keeps_its_gradients_and_no_logits() -> None:
    shape = Dense(PRESETS["llama-1b"])
    config = shape.config
    head, chunk = config.dim * config.vocab_size, 2**27

    def logits(precision: str, device: str, *, fused: bool, tokens: int = 4096) -> int:
        step = StepShape(tokens, 2, 1, precision, "none", compiled=False, fused_head=fused)
        return shape.activations(step, device).logit_bytes

    num_logits = 2 * 4096 * config.vocab_size
    assert num_logits > chunk
    assert logits("bf16", "cuda", fused=False) == 4 * num_logits + 4 * chunk
    kept = 2 * 2 * 4096 * config.dim + 4 * head
    assert logits("bf16", "cuda", fused=True) == kept + 6 * chunk + 2 * head
    assert logits("bf16", "cpu", fused=True) == kept + 6 * 2**21 + (2 + 4) * head
    assert logits("fp32", "cuda", fused=True) == 4 * 2 * 4096 * config.dim + 4 * head + 8 * chunk
    small = 2 * 8 * config.vocab_size  # no chunk is larger than all logits
    assert logits("fp32", "cuda", fused=True, tokens=8) == 4 * 2 * 8 * config.dim + 4 * head + 8 * small
