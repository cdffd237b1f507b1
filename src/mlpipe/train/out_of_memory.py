"""A rank has no memory left: whether it will be so again, and what of its plan takes less.

torch.OutOfMemoryError is of the caching allocator; what a library asks of the driver or of the kernel itself
fails as a RuntimeError in these words.
"""

from __future__ import annotations

import re
from pathlib import Path

from mlpipe._core.units import format_bytes
from mlpipe.plan.work import TrainPlan

CAUSE = "out_of_memory"  # of an outcome
_WORDS = "CUDA error: (out of memory|CUBLAS_STATUS_ALLOC_FAILED)|DefaultCPUAllocator: (can't|not enough) "


def is_out_of_memory(error: BaseException) -> bool:
    """Without torch: it may be what could not be imported."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and re.search(_WORDS, str(error)) is not None


def comes_again(scratch: Path, step: int, restart: int) -> bool:
    """Whether an earlier start on this node ran out of it after the same step, too: it computes the same each
    time. What others on the device took is gone after a while."""
    (scratch / f"out-of-memory-{step}-{restart}").touch()
    return len(list(scratch.glob(f"out-of-memory-{step}-*"))) > 1


def remedy(plan: TrainPlan) -> str:
    """What takes less, by the keys of the pipeline file, the cheapest first."""
    smaller = [*plan.smaller_micro_batches, *([plan.micro_batch // 2] if plan.micro_batch > 1 else [])]
    less = [f"micro_batch: {smaller[0]} (it was {plan.micro_batch})"] if smaller else []
    if plan.activation_checkpointing != "full":
        less.append(f"activation_checkpointing: full (it was {plan.activation_checkpointing})")
    elif plan.offload in ("off", "optimizer"):
        less.append("offload: activations")
    if plan.mesh.dp_replicate > 1:
        less.append("strategy: fsdp")
    if plan.offload in ("off", "activations"):
        less.append("offload: optimizer")
    told = ""
    if plan.predicted is not None:
        room = f" of {format_bytes(plan.memory_bytes)}" if plan.memory_bytes is not None else ""
        told = f"the plan expected {format_bytes(plan.predicted.memory_bytes)}{room} a worker; "
    return (
        f"{told}less take, the cheapest first: {', '.join(less) or 'more or larger devices'}; what each of "
        "them would need, and what takes the memory: `mlpipe plan --explain` with --set; nvidia-smi says who "
        "else is on the GPU"
    )
