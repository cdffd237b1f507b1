"""Bytes against hand counts: of parameters to the byte, of strategies by the formulas of ZeRO."""

from __future__ import annotations

import pytest

from mlpipe._core.presets import PRESETS, LlamaConfig
from mlpipe.plan.flops import counted_params, num_flops_per_token
from mlpipe.plan.memory import (
    HEAP_BYTES,
    ROOMY_BYTES,
    Counts,
    MemoryEstimate,
    Work,
    activations_bytes,
    counts,
    cpu_allocator,
    is_sparing,
    logits_bytes,
    num_large,
    rebuilt_bytes,
    small_bytes,
)
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import ORDER

pytestmark = pytest.mark.unit
# V 10, D 4, L 2, 2 query heads and 1 key/value head of 2 channels, F 6
TINY = LlamaConfig(10, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, True)
BLOCK = 2 * (4 * 4) + 2 * (4 * 2) + 3 * (4 * 6) + 2 * 4  # q o, k v, gate up down, two norms
IDLE = Work("fp32", activations=0, logits=0, accumulation=1)


def test_a_tiny_model_by_hand() -> None:
    assert TINY.num_layer_params() == BLOCK == 128
    assert TINY.num_embedding_params() == 40
    assert TINY.num_params() == 40 + 2 * 128 + 4 == 300
    untied = LlamaConfig(10, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, False)
    assert untied.num_params() == 340
    sizes = counts(untied)
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
    assert config.problems() == []
    size = name.removeprefix("llama-")
    stated = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    assert 0.9 < config.num_params() / stated < 1.25


def test_shapes_that_make_no_model() -> None:
    assert LlamaConfig(10, 5, 2, 2, 1, 6, 8, 1e4, 1e-5, True).problems()
    assert LlamaConfig(10, 6, 2, 2, 1, 6, 8, 1e4, 1e-5, True).problems()
    assert LlamaConfig(10, 8, 2, 4, 3, 6, 8, 1e4, 1e-5, True).problems()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 64])
def test_states_follow_zero(ranks: int) -> None:
    """fp32 throughout, 16 bytes a parameter: ddp all, zero1 8 + 8/N, fsdp 16/N (Rajbhandari et al. 2020)."""
    sizes = counts(PRESETS["llama-8m"])
    n = sizes.total
    share = -(-n // ranks)
    states = {}
    for name, mesh in {
        "ddp": Mesh(dp_replicate=ranks),
        "zero1": Mesh(dp_replicate=ranks),
        "zero2": Mesh(dp_shard=ranks),
        "fsdp": Mesh(dp_shard=ranks),
    }.items():
        estimate = ORDER[name].memory(sizes, IDLE, mesh)  # type: ignore[index]
        states[name] = estimate.parameters + estimate.gradients + estimate.optimizer
        assert estimate.total == states[name] + estimate.buffers
    assert states == {"ddp": 16 * n, "zero1": 8 * n + 8 * share, "zero2": 16 * share, "fsdp": 16 * share}


def test_hsdp_shards_over_one_axis_only() -> None:
    sizes = counts(PRESETS["llama-8m"])
    both = ORDER["hsdp"].memory(sizes, IDLE, Mesh(dp_replicate=4, dp_shard=2))
    assert both == ORDER["fsdp"].memory(sizes, IDLE, Mesh(dp_shard=2))


def test_buffers_by_hand() -> None:
    sizes = counts(TINY)  # 300 in all, 128 a block, 44 outside
    bf16 = Work("bf16", 0, 0, 1)
    one = Mesh()
    assert ORDER["single"].memory(sizes, IDLE, one).buffers == 0
    assert ORDER["ddp"].memory(sizes, bf16, one).buffers == 2 * 300
    assert ORDER["zero1"].memory(sizes, IDLE, Mesh(dp_replicate=3)).buffers == 4 * 4 * sizes.share(3)
    # two blocks gathered, what is outside gathered with its gradients, a block's gradients and their copy
    assert ORDER["fsdp"].memory(sizes, IDLE, one).buffers == 4 * 256 + 8 * 44 + 8 * 128
    assert ORDER["fsdp"].memory(sizes, bf16, one).buffers == 2 * 256 + 8 * 44 + 6 * 128
    assert ORDER["zero2"].memory(sizes, bf16, one).buffers == 2 * 256 + 8 * 44 + 6 * 128
    # gloo gathers into one flat tensor more, after the activations' time
    for activations, more in ((0, 4 * 300), (1000, 200), (5000, 0)):
        gloo = Work("bf16", activations, 0, 1, gloo=True)
        assert ORDER["zero1"].memory(sizes, gloo, one).buffers == 2 * 300 + 4 * 2 * 300 + more


def test_the_peak_of_fsdp_on_a_cpu_is_that_of_one_moment() -> None:
    sizes = counts(TINY)
    states, two = 12 * sizes.share(2), Mesh(dp_shard=2)

    def peak(strategy: str, activations: int, logits: int, rebuilt: int = 0) -> int:
        work = Work("fp32", activations, logits, 1, gloo=True, rebuilt=rebuilt)
        return ORDER[strategy].memory(sizes, work, two).tensors - states  # type: ignore[index]

    # the loss: what is outside is gathered, the last block's buffer left; zero2 has all blocks
    assert peak("fsdp", 9000, 9000) == 18_000 + 4 * 44 + 4 * 128
    assert peak("zero2", 9000, 9000) == 18_000 + 4 * 44 + 4 * 128 + 4 * 256
    # the last block's backward: two gathered, and the head's gradients
    assert peak("fsdp", 9000, 0, rebuilt=9000) == 18_000 + 8 * 44 + 2 * 4 * 128
    # the last reduction: all gradients, of what is outside also whole, as sent and as gloo clones it
    wide = counts(LlamaConfig(1000, 4, 2, 2, 1, 6, 8, 1e4, 1e-5, True))
    work = Work("fp32", 0, 0, 1, gloo=True)
    found = ORDER["fsdp"].memory(wide, work, two)
    assert found.tensors == 16 * wide.share(2) + 4 * 4 * wide.outside


def test_what_a_heap_holds_costs_its_holes() -> None:
    sizes = counts(PRESETS["llama-8m"])  # whose embedding is 6 MiB; 4 layers of seven matrices, nine norms
    small = 4 * (4 * (2 * 384**2 + 2 * 128 * 384 + 3 * 1024 * 384) + 9 * 384)
    assert sizes.small(1) == small
    assert sizes.small(4) == sizes.share(4) * 4
    whole = ORDER["single"].memory(sizes, Work("fp32", 0, 0, 1, small=1000), Mesh())
    assert whole.on("cpu", 1).slack == whole.holes == int(0.6 * (3 * small + 1000))
    roomy = Work("fp32", 0, 0, 1, small=1000, roomy=5000)  # states come first and leave no holes
    assert ORDER["single"].memory(sizes, roomy, Mesh()).holes == 2100
    assert ORDER["zero1"].memory(sizes, roomy, Mesh(dp_replicate=2)).holes == 2100
    sparing = Work("fp32", 0, 0, 1, small=1000)
    found = [ORDER["fsdp"].memory(sizes, work, Mesh(dp_shard=2)).holes for work in (roomy, sparing)]
    assert found[0] == found[1] > 2100
    config, same = PRESETS["llama-8m"], {"precision": "fp32", "device": "cpu", "checkpointing": "none"}
    # of 1,024 tokens 384 channels are 1.5 MiB and 1,024 of them 4; of 2,048 only k and v are below 2
    assert small_bytes(config, num_tokens=2048, **same) == 4 * 2 * 2**20
    everything = activations_bytes(config, num_tokens=1024, **same)
    assert small_bytes(config, num_tokens=1024, **same) == everything - 4 * 4 * 4 * 2**20
    assert small_bytes(config, num_tokens=1024, below=ROOMY_BYTES, **same) == everything


def test_a_tensor_of_the_threshold_lies_outside_the_heap() -> None:
    def sizes(rows: int) -> Counts:
        return Counts(0, 0, 0, ((rows, 2**10, 3),))

    rows = HEAP_BYTES // (4 * 2**10)
    assert sizes(rows).small(1) == 0
    assert sizes(rows - 1).small(1) == 3 * 4 * 2**10 * (rows - 1)
    assert sizes(rows).small(2) == 3 * HEAP_BYTES // 2
    assert sizes(5).small(2) == 3 * 4 * 2**10 * 3  # whole rows
    assert sizes(2 * rows).small(1, width=2) == 0
    assert sizes(rows).small(1, width=2) == 3 * HEAP_BYTES // 2
    same = {"precision": "fp32", "device": "cpu", "num_tokens": 1, "checkpointing": "full"}
    norm, block = 3 * [16], [*6 * [16], *2 * [16], *2 * [8], *4 * [24]]
    every = [*2 * [16], *norm, *block]  # two blocks' inputs, the last norm, and the block that is rebuilt
    for below in (8, 9, 16, 17, 24, 25):
        found = small_bytes(TINY, below=below, **same)  # type: ignore[arg-type]
        assert found == sum(size for size in every if size < below)


def test_what_a_process_has_besides() -> None:
    one = MemoryEstimate(1000, 200, 30, 4000, 500, 60, reused=90, holes=7)
    assert one.tensors == 1000 + 200 + 30 + 4000 + 500 + 60 - 90
    gpu, gpus, cpu = one.on("cuda", 1), one.on("cuda", 2), one.on("cpu", 2)
    assert (gpu.context, gpu.slack) == (2**30, int(0.08 * 5700))
    assert (gpus.context, gpus.slack) == (2**30 + 3 * 2**29, gpu.slack)
    assert (cpu.context, cpu.slack) == (2 * 2**30 // 5, 7)
    assert gpu.total == 5700 + gpu.context + gpu.slack
    assert one.on("cuda", 1).scaled(1.0) == gpu
    for ratio in (0.5, 1.5, 2):
        assert gpu.scaled(ratio).total == pytest.approx(ratio * gpu.total, abs=1)
        assert gpu.scaled(ratio).tensors == gpu.tensors


def test_what_malloc_is_told() -> None:
    assert cpu_allocator(sparing=True) == {
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_MMAP_THRESHOLD_": str(2 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(64 * 2**20),
    }
    assert cpu_allocator(sparing=False) == {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "MALLOC_MMAP_THRESHOLD_": str(16 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**30),
    }
    assert not is_sparing(Mesh(dp_replicate=4), "none")
    assert is_sparing(Mesh(dp_shard=2), "none")
    assert is_sparing(Mesh(), "full")


def test_large_tensors_of_a_block() -> None:
    """By size a token: residual stream 16, half of it 8, its matmuls' 16 (bf16: 8), the MLP's 24 (12), keys'
    and values' 8 (4)."""

    def of(size: int, precision: str = "fp32", checkpointing: str = "none") -> int:
        """Where a token of `size` bytes just reaches the threshold."""
        num_tokens = -(-HEAP_BYTES // size)
        return num_large(TINY, num_tokens=num_tokens, precision=precision, checkpointing=checkpointing)

    assert [of(size) for size in (24, 16, 8)] == [8, 8 + 30 + 9, 8 + 30 + 9 + 27 + 6]
    assert of(25) == 0
    assert of(17) == 8
    assert of(17, checkpointing="full") == 8 + 4
    assert [of(size, "bf16") for size in (16, 12, 8, 4)] == [30, 38, 30 + 8 + 27 + 9, 30 + 8 + 27 + 9 + 6]
    more = [4, 4 + 9 + 2, 4 + 9 + 2 + 15 + 3]
    for again, first, size in zip(more, (8, 47, 80), (24, 16, 8), strict=True):
        assert of(size, checkpointing="full") == again + first
    assert of(12, "bf16", "selective") - of(12, "bf16") == 9 + 4
    assert of(8, "bf16", "selective") - of(8, "bf16") == 9 + 4 + 15 + 2


def test_what_recomputation_brings_back_by_hand() -> None:
    def of(device: str, checkpointing: str, precision: str = "fp32", num_tokens: int = 1) -> int:
        return rebuilt_bytes(
            TINY, num_tokens=num_tokens, precision=precision, device=device, checkpointing=checkpointing
        )

    new, block = 2 * 4 * 6 + 16, 2 * 32 + 4 * (4 + 4 + 2 + 2) + 4 * 24
    assert of("cpu", "none") == new
    assert of("cpu", "none", num_tokens=5) == 5 * new
    assert of("cuda", "none") == 0
    assert of("cuda", "full") == block + new
    assert of("cpu", "full") == block + 2 * 16 + new  # norms are not fused there
    assert of("cpu", "full", num_tokens=3) == 3 * of("cpu", "full")
    assert of("cuda", "selective", "bf16") == 2 * 24 + 2 * (4 + 4 + 2 + 2) + 2 * 24 + 2 * 2 * 6 + 16


def test_shares_are_whole_rows() -> None:
    """Of 4 ranks: 3 of 10 rows of the embedding, 1 of 4 (q, o), 1 of 2 (k, v), 2 of 6 (gate, up), 1 of 4 rows
    of down; of a norm's 4 channels 1."""
    assert counts(TINY).share(4) == 3 * 4 + 2 * 2 * 4 + 2 * 2 * 4 + 2 * 2 * 2 * 4 + 2 * 1 * 6 + 5 * 1 == 93


def test_accumulation_keeps_whole_gradients_under_fsdp() -> None:
    sizes, mesh = counts(TINY), Mesh(dp_shard=4)
    several = Work("bf16", 0, 0, accumulation=2)
    assert ORDER["fsdp"].memory(sizes, several, mesh).gradients == 4 * 93 + 4 * 300
    at_once = Work("bf16", 0, 0, accumulation=2, reduce_every=True)
    assert ORDER["fsdp"].memory(sizes, at_once, mesh).gradients == 4 * 93
    assert ORDER["ddp"].memory(sizes, several, Mesh(dp_replicate=4)).gradients == 4 * 300


def test_activations_by_hand() -> None:
    def of(precision: str, device: str = "cuda", checkpointing: str = "none", num_tokens: int = 1) -> int:
        return activations_bytes(
            TINY, num_tokens=num_tokens, precision=precision, device=device, checkpointing=checkpointing
        )

    norm = 4 * 4 + 4 * 4
    block = 2 * norm + 4 * (4 + 4 + 2 + 2) + 4 * (4 * 6)
    assert of("fp32") == 2 * block + norm
    assert of("fp32", num_tokens=7) == 7 * of("fp32")
    assert of("fp32", device="cpu") == of("fp32") + 5 * 4 * 4
    assert of("fp32", checkpointing="full") == 2 * (4 * 4) + norm
    assert of("fp32", checkpointing="selective") == 2 * (4 * 4 + 4 * (3 * 4 + 2 + 6)) + norm
    assert of("bf16", checkpointing="selective") == 2 * (4 * 4 + 2 * (3 * 4 + 2 + 6)) + 24
    rebuilt = rebuilt_bytes(TINY, num_tokens=1, precision="fp32", device="cuda", checkpointing="full")
    assert rebuilt == block + 2 * 4 * 6 + 4 * 4
    norm = 4 * 4 + 2 * 4
    assert of("bf16") == 2 * (2 * norm + 2 * (4 + 4 + 2 + 2) + 2 * (4 * 6)) + norm
    deep = PRESETS["llama-8b"]
    sizes = [
        activations_bytes(deep, num_tokens=8192, precision="bf16", device="cuda", checkpointing=mode)
        for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[1] / 2 < sizes[0] / 2


def test_logits_by_hand() -> None:
    assert logits_bytes(TINY, num_tokens=8, precision="fp32", device="cpu") == 2 * 4 * 80 + 8 * 80
    at_once = logits_bytes(PRESETS["llama-8m"], num_tokens=8192, precision="bf16", device="cpu")
    assert at_once == 2 * 2 * 8192 * PRESETS["llama-8m"].vocab_size + 8 * 2**18
    big = logits_bytes(PRESETS["llama-8b"], num_tokens=8192, precision="bf16", device="cuda")
    assert big == 2 * 2 * 8192 * 128_256 + 8 * 2**27


def test_flops_by_hand() -> None:
    """facts: Llama-8B at 8k is 57.9 GFLOP a token without the causal discount."""
    assert counted_params(TINY) == 300
    assert num_flops_per_token(TINY, 8) == 6 * 300 + 6 * 2 * 2 * (2 + 2) * 8
    assert counted_params(PRESETS["llama-8b"]) == 8_030_261_248 - 128_256 * 4096
    assert num_flops_per_token(PRESETS["llama-8b"], 8192) == pytest.approx(57.9e9, rel=1e-3)
