"""FSDP2, ZeRO-3: weights, gradients and optimizer states are split; each block is gathered when needed."""

from __future__ import annotations

from mlpipe.plan.memory import (
    ADAM_BYTES,
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Counts,
    MemoryEstimate,
    Work,
)
from mlpipe.plan.plan import Mesh

SHARDS = "weights, gradients and optimizer states"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return Mesh(dp_shard=num_nodes * devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    """Two blocks are gathered at a time, the current and the prefetched one."""
    return sharded(counts, work, mesh, gathered_blocks=2 * counts.block)


def sharded(counts: Counts, work: Work, mesh: Mesh, *, gathered_blocks: int) -> MemoryEstimate:
    """All states split over `dp_shard`; besides, whole: `gathered_blocks` parameters of blocks in the compute
    dtype, what is outside the blocks in fp32 with its gradients, and the larger of what reductions hold: a
    block's gradients with their fp32 input, or the fp32 input of what is outside. Accumulation keeps the
    gradients of all microbatches whole, in fp32, until the last one sends them."""
    width = COMPUTE_BYTES[work.precision]
    share = -(-counts.total // mesh.dp_shard)
    unsent = GRADIENT_BYTES * counts.total if work.accumulation > 1 else 0
    gathered = width * gathered_blocks + (WEIGHT_BYTES + GRADIENT_BYTES) * counts.outside
    reducing = max((width + GRADIENT_BYTES) * counts.block, GRADIENT_BYTES * counts.outside)
    return MemoryEstimate(
        parameters=WEIGHT_BYTES * share,
        gradients=GRADIENT_BYTES * share + unsent,
        optimizer=ADAM_BYTES * share,
        activations=work.activations,
        logits=work.logits,
        buffers=gathered + reducing,
    )
