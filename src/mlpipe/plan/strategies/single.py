"""One worker, nothing to communicate."""

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

SHARDS = "nothing"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    if num_nodes * devices_per_node != 1:
        return f"single is one worker, and there are {num_nodes * devices_per_node}"
    return Mesh()


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    """Autocast keeps its bf16 copies of the weights until the forward pass ends."""
    copies = COMPUTE_BYTES["bf16"] * counts.total if work.precision == "bf16" else 0
    return MemoryEstimate(
        parameters=WEIGHT_BYTES * counts.total,
        gradients=GRADIENT_BYTES * counts.total,
        optimizer=ADAM_BYTES * counts.total,
        activations=work.activations,
        logits=work.logits,
        buffers=copies,
    )
