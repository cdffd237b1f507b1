"""Model shapes by hand, and one that the planner has never seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from unit.plan.test_plan_memory import TINY

from mlpipe._core.presets import PRESETS
from mlpipe.plan.allocators.glibc import RETAINING_BYTES, TRIMMING_BYTES
from mlpipe.plan.candidates import enumerate_candidates
from mlpipe.plan.choose import choose
from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.hardware import CPU_CORE, GIB, GPUS, Hardware
from mlpipe.plan.kernels import Kernels
from mlpipe.plan.recomputation import keeps_matmul, recomputed_matmuls, recomputes_attention
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, PassSeconds, StepShape
from mlpipe.plan.tensors import Tensors, below, total
from mlpipe.spec.load import load_pipeline

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]


def activations(
    shape: Dense, num_tokens: int, precision: str = "fp32", device: str = "cpu", checkpointing: str = "none"
) -> Activations:
    step = StepShape(num_tokens, 1, 1, precision, checkpointing, compiled=False)
    return shape.activations(step, device)


def test_shares_are_whole_rows() -> None:
    """Of 4 ranks: 3 of 10 rows of the embedding, 1 of 4 (q, o), 1 of 2 (k, v), 2 of 6 (gate, up), 1 of 4 rows
    of down; of a norm's 4 channels 1."""
    sizes = Dense(TINY).parameters
    assert sizes.share(4) == 3 * 4 + 2 * 2 * 4 + 2 * 2 * 4 + 2 * 2 * 2 * 4 + 2 * 1 * 6 + 5 * 1 == 93
    assert total(sizes.sharded(4, 2)) == 2 * 93
    assert (sizes.total, sizes.block, sizes.outside, sizes.num_blocks) == (300, 128, 44, 2)


def test_saved_activations_by_hand() -> None:
    def saved(precision: str, device: str = "cuda", checkpointing: str = "none", num_tokens: int = 1) -> int:
        return total(activations(Dense(TINY), num_tokens, precision, device, checkpointing).saved)

    norm = 4 * 4 + 4 * 4
    block = 2 * norm + 4 * (4 + 4 + 2 + 2) + 4 * (4 * 6)
    assert saved("fp32", device="cpu") == 2 * block + norm + 5 * 4 * 4
    repeated = 4 * (2 + 2)  # keys and values, for a kernel that knows no groups
    assert saved("fp32") == 2 * (block + repeated) + norm
    assert saved("fp32", num_tokens=7) == 7 * saved("fp32")
    assert saved("fp32", checkpointing="full") == 2 * (4 * 4) + norm
    assert saved("fp32", checkpointing="selective") == 2 * (4 * 4 + 4 * (3 * 4 + 2 + 6)) + norm
    assert saved("bf16", checkpointing="selective") == 2 * (4 * 4 + 2 * (3 * 4 + 2 + 6)) + 24
    norm = 4 * 4 + 2 * 4
    assert saved("bf16") == 2 * (2 * norm + 2 * (4 + 4 + 2 + 2) + 2 * (4 * 6)) + norm
    sizes = [
        total(activations(Dense(PRESETS["llama-8b"]), 8192, "bf16", "cuda", mode).saved)
        for mode in ("none", "selective", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] < sizes[1] / 2 < sizes[0] / 2


def test_saved_tensors_by_size() -> None:
    """Of 1,024 tokens 384 channels are 1.5 MiB and 1,024 of them 4; of 2,048 only k and v are below 2."""
    shape = Dense(PRESETS["llama-8m"])
    assert below(activations(shape, 2048).saved, TRIMMING_BYTES) == 4 * 2 * 2**20
    saved = activations(shape, 1024).saved
    assert below(saved, TRIMMING_BYTES) == total(saved) - 4 * 4 * 4 * 2**20
    assert below(saved, RETAINING_BYTES) == total(saved)
    # two blocks' inputs and the last norm, and the block that is rebuilt
    kept = activations(Dense(TINY), 1, checkpointing="full")
    norm, block = 3 * [16], [*6 * [16], *2 * [16], *2 * [8], *4 * [24]]
    for limit in (8, 9, 16, 17, 24, 25):
        assert below(kept.saved, limit) == sum(size for size in [16, 16, *norm] if size < limit)
        assert below(kept.rebuilt, limit) == sum(size for size in block if size < limit)


def test_what_a_backward_pass_brings_back_by_hand() -> None:
    def of(device: str, checkpointing: str, precision: str = "fp32", num_tokens: int = 1) -> tuple[int, int]:
        made = activations(Dense(TINY), num_tokens, precision, device, checkpointing)
        return total(made.rebuilt), made.backward_bytes

    new, block = 2 * 4 * 6 + 16, 2 * 32 + 4 * (4 + 4 + 2 + 2) + 4 * 24
    assert of("cpu", "none") == (0, new)
    assert of("cpu", "none", num_tokens=5) == (0, 5 * new)
    assert of("cuda", "none") == (0, 0)
    assert of("cuda", "full") == (block + 4 * (2 + 2), new)  # each query head has keys and values of its own
    assert of("cpu", "full") == (block + 2 * 16, new)  # norms are not fused there
    assert of("cpu", "full", num_tokens=3) == (3 * (block + 2 * 16), 3 * new)
    low = (2 * 24 + 2 * (4 + 4 + 2 + 2) + 2 * 24, 2 * 2 * 6 + 16)
    assert of("cuda", "selective", "bf16") == low


def test_logits_by_hand() -> None:
    assert activations(Dense(TINY), 8).logit_bytes == 2 * 4 * 80 + 4 * 80
    small = Dense(PRESETS["llama-8m"])
    at_once = activations(small, 8192, "bf16").logit_bytes
    assert at_once == 2 * 2 * 8192 * small.config.vocab_size + 4 * 2**18
    big = activations(Dense(PRESETS["llama-8b"]), 8192, "bf16", "cuda").logit_bytes
    assert big == 2 * 2 * 8192 * 128_256 + 4 * 2**27


def test_tensors_that_passes_make() -> None:
    """By bytes a token: residual stream 16, half of it 8, its matmuls' 16 (bf16: 8), the MLP's 24 (12), keys'
    and values' 8 (4); of two blocks."""

    def of(size: int, precision: str = "fp32", checkpointing: str = "none") -> int:
        made = activations(Dense(TINY), 10, precision, checkpointing=checkpointing).made
        return sum(tensors.number for tensors in made if not tensors.is_below(10 * size)) // 2

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


def test_flops_by_hand() -> None:
    """facts: Llama-8B at 8k is 57.9 GFLOP a token without the causal discount."""
    assert Dense(TINY).flops_per_token(8) == 6 * 300 + 6 * 2 * 2 * (2 + 2) * 8
    large = Dense(PRESETS["llama-8b"])
    assert large.counted_params == 8_030_261_248 - 128_256 * 4096
    assert large.flops_per_token(8192) == pytest.approx(57.9e9, rel=1e-3)
    # forward of k (4 x 2), o (4 x 4) and up (4 x 6) in two blocks; of all but down, and attention
    assert Dense(TINY).recomputed_flops_per_token("selective", 8) == 2 * 2 * (8 + 16 + 24)
    assert Dense(TINY).recomputed_flops_per_token("full", 8) == 2 * 2 * (32 + 16 + 48 + 2 * 4 * 8)
    assert Dense(TINY).recomputed_flops_per_token("none", 8) == 0


def test_what_selective_checkpointing_keeps() -> None:
    """Of q, k, v, o, gate, up and down: q, v, gate, down."""
    assert [i for i in range(7) if keeps_matmul(i)] == [0, 2, 4, 6]
    assert recomputed_matmuls("selective", 7) == [1, 3, 5]
    assert recomputed_matmuls("full", 7) == [0, 1, 2, 3, 4, 5]
    assert recomputed_matmuls("none", 7) == []
    assert [recomputes_attention(mode) for mode in ("none", "selective", "full")] == [False, False, True]


@dataclass(frozen=True)
class ToyExperts:
    """Blocks of one matmul to a router and `num_experts` matrices, of which a token sees two."""

    num_blocks: int = 4
    dim: int = 1024
    num_experts: int = 16

    @property
    def parameters(self) -> ParameterCounts:
        expert, router = self.dim**2, self.dim * self.num_experts
        block, outside = self.num_experts * expert + router, 8192 * self.dim
        experts = (self.dim, self.dim, self.num_blocks * self.num_experts)
        tensors = (experts, (self.num_experts, self.dim, self.num_blocks), (8192, self.dim, 1))
        return ParameterCounts(self.num_blocks * block + outside, block, outside, self.num_blocks, tensors)

    @property
    def widths(self) -> Mapping[str, int]:
        return {"dim": self.dim, "num_experts": self.num_experts}

    def flops_per_token(self, seq_len: int) -> float:
        active = self.num_blocks * (2 * self.dim**2 + self.dim * self.num_experts) + 8192 * self.dim
        return num_flops_per_token(active, 0, seq_len)

    def activations(self, step: StepShape, device: str) -> Activations:
        kept = Tensors(self.num_blocks * 3 * step.num_tokens * 4 * self.dim, 3 * self.num_blocks)
        return Activations((kept,), (), 0, 8 * step.num_tokens * 8192, ())

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        block = kernels.matmul(step.num_tokens, self.dim, self.num_experts)
        block += 2 * kernels.matmul(step.num_tokens, self.dim, self.dim)
        head = kernels.matmul(step.num_tokens, self.dim, 8192)
        return PassSeconds(block, 2 * block, head, 2 * head)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_planner_plans_a_shape_that_it_has_never_seen(device: str) -> None:
    spec = (
        load_pipeline(ROOT / "pipelines" / "quickstart.yaml", overrides=["train.strategy=auto"])
        .stage("train")
        .train
    )
    assert spec is not None
    gpu = GPUS["H100-80GB"]
    hardware = Hardware("cpu", 1, 4, 8 * GIB, "CPU worker", {}, 4, CPU_CORE)
    if device == "cuda":
        hardware = Hardware("cuda", 1, 4, 4 * GIB, "H100-80GB", gpu.speed.peak_flops, 16, gpu.speed)
    shape = ToyExperts()
    candidates = enumerate_candidates(spec, shape, hardware)
    best, reason = choose(candidates)
    assert {c.strategy for c in candidates if c.memory} == {"ddp", "zero1", "zero2", "fsdp"}
    assert best.fits
    assert best.memory is not None
    assert best.mfu_ratio is not None
    assert reason
    whole = next(c for c in candidates if c.strategy == "ddp" and c.memory)
    assert whole.memory is not None
    assert whole.memory.parameters == 4 * shape.parameters.total
    # more experts are more bytes, and for a token as many FLOPs but for the router's
    more = dataclasses.replace(shape, num_experts=32)
    ratio = more.flops_per_token(1) / shape.flops_per_token(1)
    assert ratio == pytest.approx(1, rel=0.01)
    larger = [c for c in enumerate_candidates(spec, more, hardware) if c.strategy == "ddp" and c.memory]
    assert larger[0].memory is not None
    assert larger[0].memory.parameters > 1.8 * whole.memory.parameters
