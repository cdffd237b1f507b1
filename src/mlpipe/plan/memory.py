"""Bytes per rank, by cause. Standard library only.

The trainer keeps fp32 weights, gradients and Adam moments (16 bytes a parameter) whatever the precision;
under bf16 the matmuls see bf16 copies of the weights, which are counted as buffers. What a strategy shards
is in `plan/strategies/<name>.py`; activations and logits are the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlpipe._core.presets import LlamaConfig
from mlpipe.plan.plan import Mesh

GIB = 2**30
# On a CPU smaller tensors lie in a heap (`cpu_allocator` tells malloc so), whose holes are not given back.
# ROOMY: they were 0.31 to 0.48 of the activations after eight steps of benchmarks/planner's configurations.
# HEAP: of all that is in it, since a tensor of the same size, aligned anew, seldom fits a hole; they grow
# over the first steps: 0.2 to 0.6 after four, 0.5 to 1 after eight.
ROOMY_BYTES, _ROOMY_HOLES = 16 * 2**20, 0.42
HEAP_BYTES, _HOLES = 2 * 2**20, 0.6
WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
ADAM_BYTES = 8
COMPUTE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Counts:
    """A model in numbers of parameters: in all, of one of its equal blocks, and of all that is in no block
    (embedding, last norm, head). `tensors`: rows, parameters a row, and how many such tensors there are."""

    total: int
    block: int
    outside: int
    tensors: tuple[tuple[int, int, int], ...]

    def share(self, num_ranks: int) -> int:
        """Of the first rank, which has the most: each tensor is cut into equal whole rows, as torch.chunk
        does, and FSDP2 and zero1 with it."""
        return sum(-(-rows // num_ranks) * width * many for rows, width, many in self.tensors)

    def saved_bytes(self, num_ranks: int) -> int:
        """Of a checkpoint, what each of all ranks writes under any strategy: weights and moments are written
        once, and ranks that hold the same share the writing (`share` in `train/checkpoint.py`)."""
        return (WEIGHT_BYTES + ADAM_BYTES) * self.share(num_ranks)

    def small(self, num_ranks: int, width: int = WEIGHT_BYTES) -> int:
        """Bytes of the share, in tensors of `width` bytes a parameter, that a CPU's heap holds."""
        shares = [(width * -(-rows // num_ranks) * columns, many) for rows, columns, many in self.tensors]
        return sum(size * many for size, many in shares if size < HEAP_BYTES)


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step. `buffers`: copies and communication. `context`: what the
    process holds before the first tensor. `slack`: what the allocator cannot use. `reused`: what is not alive
    at the same time, as gradients that come to life when activations die; subtracted. `holes`: of a CPU's
    heap; they become slack."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    context: int = 0
    slack: int = 0
    reused: int = 0
    holes: int = 0

    @property
    def tensors(self) -> int:
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.logits + self.buffers - self.reused

    @property
    def total(self) -> int:
        return self.tensors + self.context + self.slack

    def on(self, device: str, world_size: int) -> MemoryEstimate:
        """With what a process has besides. On CUDA kernels and cuBLAS workspaces 1 GiB, NCCL 1.5 GiB, and
        8 % that fragmentation keeps from use. On CPU 0.4 GiB that the kernel cannot take back (the resident
        set of torch 2.15 shows 0.3 GiB of library pages more) and the holes of the heap."""
        if device == "cuda":
            context, slack = GIB + (3 * GIB // 2 if world_size > 1 else 0), 0.08 * self.tensors
        else:
            context, slack = 2 * GIB // 5, self.holes
        return replace(self, context=context, slack=int(slack))

    def scaled(self, ratio: float) -> MemoryEstimate:
        """By what finished runs needed; the difference counts as slack, which may so become negative."""
        return replace(self, slack=self.slack + int((ratio - 1) * self.total)) if ratio != 1 else self


@dataclass(frozen=True)
class Work:
    """What one rank does in a step, whatever the strategy: bytes held for the backward pass of one
    microbatch, and how many microbatches. `reduce_every`: see `TrainPlan.reduce_gradients`. `rebuilt`: what
    recomputation brings back at a time, when the logits are gone: the peak has the larger of both. `gloo`:
    the collectives are gloo's, on CPU tensors. `small`: of the activations, what a sparing CPU's heap holds;
    `roomy`: what a roomy one's does, None where activations are recomputed (see `cpu_allocator`)."""

    precision: str
    activations: int
    logits: int
    accumulation: int
    reduce_every: bool = False
    rebuilt: int = 0
    gloo: bool = False
    small: int = 0
    roomy: int | None = None

    @property
    def held(self) -> int:
        """Activations at the peak."""
        return self.activations + max(0, self.rebuilt - self.logits)

    def holes(self, states: int) -> int:
        """Of a rank that has everything whole; `states`: of the parameters' tensors, what the heap holds."""
        return sparing_holes(states + self.small) if self.roomy is None else int(_ROOMY_HOLES * self.roomy)


def is_sparing(mesh: Mesh, checkpointing: str) -> bool:
    """Whether the plan itself trades time for memory, so that a CPU's malloc should (see `cpu_allocator`)."""
    return mesh.dp_shard > 1 or checkpointing != "none"


def cpu_allocator(*, sparing: bool) -> dict[str, str]:
    """glibc's settings for a rank that computes on a CPU. All but the largest tensors lie in a heap of huge
    pages that stays: a step of a 21M GPT has a hundredth of the default's page faults. `sparing`, for a plan
    that itself trades time for memory (it shards weights or recomputes activations): tensors of HEAP_BYTES
    and more go back when they die, which costs up to a third (llama-8m, one rank, full recomputation), since
    FSDP's short-lived buffers leave holes as large as the model in a heap, and recomputation would save a
    quarter of what it does (915 to 871 MiB, instead of 747)."""
    if sparing:
        kept = {"THP_MEM_ALLOC_ENABLE": "1"}  # torch asks for huge pages in what is large
        return kept | _thresholds(HEAP_BYTES, 64 * 2**20)
    return {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | _thresholds(ROOMY_BYTES, 2**30)


def _thresholds(mmap: int, trim: int) -> dict[str, str]:
    """Given, they stay: glibc's own move, up to 32 MiB."""
    return {"MALLOC_MMAP_THRESHOLD_": str(mmap), "MALLOC_TRIM_THRESHOLD_": str(trim)}


def sparing_holes(small: int) -> int:
    return int(_HOLES * small)


def counts(config: LlamaConfig) -> Counts:
    total, block = config.num_params(), config.num_layer_params()
    return Counts(total, block, total - config.num_layers * block, tuple(config.tensors()))


def activations_bytes(
    config: LlamaConfig, *, num_tokens: int, precision: str, device: str, checkpointing: str = "none"
) -> int:
    """What autograd saves for `num_tokens`, read off `train/models/llama.py`, with attention that stores no
    T x T matrix. Of a norm: its input (fp32, the residual stream), its output, and on CPU, where it is not
    fused, the normalised input. Of a block: two norms; rotated q and k, v and the attention's output; gate,
    up, silu(gate) and their product. Checkpointing (see
    `train/parallel/activation_checkpointing.py`): `full` keeps each block's input; `selective` also attention
    and every second matmul (q, v, gate, down)."""
    norm, block = _saved(config, precision, device, checkpointing)
    return num_tokens * (config.num_layers * sum(block) + sum(norm))


def small_bytes(
    config: LlamaConfig,
    *,
    num_tokens: int,
    precision: str,
    device: str,
    checkpointing: str,
    below: int = HEAP_BYTES,
) -> int:
    """Of the activations, and of the block that is rebuilt, what lies in tensors that a CPU's heap holds."""
    norm, block = _saved(config, precision, device, checkpointing)
    again = _saved(config, precision, device, "none")[1] if checkpointing != "none" else []
    each = [num_tokens * size for size in [*config.num_layers * block, *norm, *again]]
    return sum(size for size in each if size < below)


def num_large(config: LlamaConfig, *, num_tokens: int, precision: str, checkpointing: str = "none") -> int:
    """Tensors of HEAP_BYTES and more that the passes of one block make on a CPU, as torch's profiler saw them
    of llama-8m with 2,048 and 4,096 tokens in fp32 and bf16: fp32 ones of the residual stream's width and of
    half of it (the rotation's), and those of matmuls; with recomputation as many again as are rebuilt."""
    width, dim, ffn = COMPUTE_BYTES[precision], config.dim, config.ffn_dim
    kv_dim = config.num_kv_heads * config.head_dim
    made = [(30, 4 * dim), (27, 2 * dim), (9, width * dim), (8, width * ffn), (6, width * kv_dim)]
    if checkpointing != "none":
        made += [(9, 4 * dim), (15, 2 * dim), (2, width * dim), (4, width * ffn), (3, width * kv_dim)]
    return sum(number for number, size in made if num_tokens * size >= HEAP_BYTES)


def rebuilt_bytes(
    config: LlamaConfig, *, num_tokens: int, precision: str, device: str, checkpointing: str
) -> int:
    """One block as its backward pass finds it, and the most that this makes beside it: at the product of the
    MLP, whose two factors' gradients are new while what came in has not been freed, and the residual
    stream's. Without recomputation only these, and on a GPU, whose logits are larger, not even these."""
    new = 2 * COMPUTE_BYTES[precision] * config.ffn_dim + 4 * config.dim
    if checkpointing == "none":
        return num_tokens * new if device == "cpu" else 0
    return num_tokens * (sum(_saved(config, precision, device, "none")[1]) + new)


def _saved(
    config: LlamaConfig, precision: str, device: str, checkpointing: str
) -> tuple[list[int], list[int]]:
    """Bytes a token of each tensor of a norm, and of a block."""
    width, dim, ffn = COMPUTE_BYTES[precision], config.dim, config.ffn_dim
    kv_dim = config.num_kv_heads * config.head_dim
    norm = [4 * dim, width * dim] + ([4 * dim] if device == "cpu" else [])
    if checkpointing == "full":
        return norm, [4 * dim]
    if checkpointing == "selective":
        return norm, [4 * dim, *3 * [width * dim], width * kv_dim, width * ffn]
    return norm, [*2 * norm, *2 * [width * dim], *2 * [width * kv_dim], *4 * [width * ffn]]


def logits_bytes(config: LlamaConfig, *, num_tokens: int, precision: str, device: str) -> int:
    """Logits and their gradient in the compute dtype, and the fp32 log-probabilities of the chunk that
    `train/loss.py` works on, with one copy."""
    chunk = min(num_tokens * config.vocab_size, 2**18 if device == "cpu" else 2**27)
    return 2 * COMPUTE_BYTES[precision] * num_tokens * config.vocab_size + 8 * chunk
