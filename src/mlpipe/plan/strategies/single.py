"""One worker, nothing to communicate."""

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

SHARDS = "nothing"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    if num_nodes * devices_per_node != 1:
        return f"single is one worker, and there are {num_nodes * devices_per_node}"
    return Mesh()


def memory(counts: Counts, activations: Activations, mesh: Mesh, precision: str) -> MemoryEstimate:
    """Autocast keeps its bf16 copies of the weights until the forward pass ends."""
    n = counts.num_params
    copies = COMPUTE_BYTES[precision] * n if precision == "bf16" else 0
    return MemoryEstimate(
        parameters=WEIGHT_BYTES * n,
        gradients=GRADIENT_BYTES * n,
        optimizer=ADAM_BYTES * n,
        activations=activations.blocks,
        logits=activations.logits,
        buffers=copies,
    )
