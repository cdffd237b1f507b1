"""FSDP2, ZeRO-3: weights, gradients and optimizer states are split; each block is gathered when needed."""

from __future__ import annotations

from mlpipe.plan.memory import (
    ADAM_BYTES,
    COMPUTE_BYTES,
    GRADIENT_BYTES,
    WEIGHT_BYTES,
    Activations,
    Counts,
    MemoryEstimate,
)
from mlpipe.plan.plan import Mesh

SHARDS = "weights, gradients and optimizer states"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return Mesh(dp_shard=num_nodes * devices_per_node)


def memory(counts: Counts, activations: Activations, mesh: Mesh, precision: str) -> MemoryEstimate:
    """Two groups are gathered at a time, the current and the prefetched one; the gradients of a group are
    whole before they are reduced, in fp32."""
    width = COMPUTE_BYTES[precision]
    return sharded(counts, activations, mesh, gathered=2 * width * counts.largest_group, precision=precision)


def sharded(
    counts: Counts, activations: Activations, mesh: Mesh, *, gathered: int, precision: str
) -> MemoryEstimate:
    """Everything split over `dp_shard`, plus `gathered` bytes of weights and one group's gradients: as the
    backward pass leaves them, and the fp32 input of the reduce-scatter."""
    share = -(-counts.num_params // mesh.dp_shard)
    reducing = (COMPUTE_BYTES[precision] + GRADIENT_BYTES) * counts.largest_group
    return MemoryEstimate(
        parameters=WEIGHT_BYTES * share,
        gradients=GRADIENT_BYTES * share,
        optimizer=ADAM_BYTES * share,
        activations=activations.blocks,
        logits=activations.logits,
        buffers=gathered + reducing,
    )
