"""Bytes per rank, by cause. Standard library only.

The trainer keeps fp32 weights, gradients and Adam moments (16 bytes a parameter) whatever the precision;
under bf16 the matmuls see bf16 copies of the weights, which are counted as buffers. What a strategy shards
is in `plan/strategies/<name>.py`; activations and logits are the same for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlpipe.plan.presets import LlamaConfig

WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
ADAM_BYTES = 8
COMPUTE_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Counts:
    """A model in numbers of parameters. `largest_group`: of the biggest set that FSDP gathers at once, a
    block or all that is in no block."""

    num_params: int
    largest_group: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step. `buffers`: copies and communication."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers
        )


@dataclass(frozen=True)
class Activations:
    """Bytes that one rank holds for the backward pass of one microbatch."""

    blocks: int
    logits: int


def counts(config: LlamaConfig) -> Counts:
    outside = config.num_params() - config.num_layers * config.num_layer_params()
    return Counts(config.num_params(), max(outside, config.num_layer_params()))


def activations(
    config: LlamaConfig, *, seq_len: int, micro_batch: int, precision: str, checkpointing: str
) -> Activations:
    """What autograd saves of a block, counted off `train/models/llama.py` for one token, with attention that
    stores no T x T matrix: the norms' inputs and outputs, q, k, v, the attention's output, and of the
    SwiGLU gate, up, silu(gate) and the product. Checkpointing `full` keeps each block's input and rebuilds
    one block at a time; `selective` keeps the outputs of matmuls and attention and rebuilds the rest.
    Logits: 12 bytes each at the peak of the eager backward (fp32 logits, log-softmax, gradient)."""
    width = COMPUTE_BYTES[precision]
    tokens = seq_len * micro_batch
    kv_dim = config.num_kv_heads * config.head_dim
    norms = 2 * (4 + width) * config.dim  # fp32 inputs, outputs for the matmuls
    attention = width * (2 * config.dim + 2 * kv_dim)  # rotated q, k; v; output
    feed_forward = width * 4 * config.ffn_dim
    block = norms + attention + feed_forward
    block_input = 4 * config.dim
    kept = {
        "none": config.num_layers * block,
        "selective": config.num_layers * (block_input + attention + width * (config.dim + 2 * config.ffn_dim))
        + block,
        "full": config.num_layers * block_input + block,
    }[checkpointing]
    return Activations(blocks=tokens * kept, logits=12 * tokens * config.vocab_size)
