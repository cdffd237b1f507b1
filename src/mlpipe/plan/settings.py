"""What a training may be told to do by name, beside its mesh: one of a few words each."""

from __future__ import annotations

from typing import Literal

from mlpipe.plan.mesh import Mesh

Checkpointing = Literal["none", "selective", "full"]
Compile = Literal["off", "block", "model"]
Precision = Literal["fp32", "bf16", "fp16"]
Communication = Literal["collective", "resident", "on_demand"]
ContextExchange = Literal["all_gather", "ring"]  # how keys and values come to the ranks of `cp`
Offload = Literal["off", "activations", "optimizer", "all"]  # what waits on the host
Loss = Literal["logits", "fused"]  # of whole logits, or of the head's input, a chunk of rows at a time
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")  # by what is computed again


def adds_exactly(deterministic: bool, precision: str) -> bool:
    """Of `TrainPlan.exact_sums`."""
    return deterministic and precision != "fp32"


def compiled(asked: Compile, mesh: Mesh, checkpointing: str) -> Compile:
    """What of a model is compiled where the user asks for `asked`. What hooks in between the blocks breaks
    the graph of a whole model: sharded or recomputed blocks are compiled one by one, and those of a
    pipeline's stages."""
    between = mesh.dp_shard > 1 or mesh.pp > 1 or checkpointing != "none"
    return "block" if asked == "model" and between else asked
