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
from mlpipe.plan.time import Passes, Wire

SHARDS = "nothing"
FLAGS: dict[str, bool] = {}


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    if num_nodes * devices_per_node != 1:
        return f"single is one worker, and there are {num_nodes * devices_per_node}"
    return Mesh()


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    """Autocast keeps its bf16 copies of the weights until the forward pass ends. Without accumulation the
    gradients come to life in the backward pass, as the activations die, all but the last that is rebuilt."""
    copies = COMPUTE_BYTES["bf16"] * counts.total if work.precision == "bf16" else 0
    gradients, held = GRADIENT_BYTES * counts.total, work.held
    return MemoryEstimate(
        parameters=WEIGHT_BYTES * counts.total,
        gradients=gradients,
        optimizer=ADAM_BYTES * counts.total,
        activations=held,
        logits=work.logits,
        buffers=copies,
        reused=min(gradients, held + work.logits - work.rebuilt) if work.accumulation == 1 else 0,
        holes=work.holes(
            (WEIGHT_BYTES + ADAM_BYTES) // WEIGHT_BYTES * counts.small(1)
            + (counts.small(1, COMPUTE_BYTES["bf16"]) if copies else 0)
        ),
    )


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    return 0.0


def updated(counts: Counts, mesh: Mesh) -> int:
    return counts.total
