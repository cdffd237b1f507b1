"""torch.compile: each block by itself, or the whole model with its loss as one graph."""

from __future__ import annotations

from mlpipe.plan.plan import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Marks what is compiled at the first forward."""
    if plan.compile == "model":
        model.built.module.compile()
        return
    for block in model.built.blocks:
        block.compile()
    # On a GPU, where memory's speed bounds the loss; a CPU has it in its cache, chunk by chunk.
    model.built.module.fused_loss = world.device.type == "cuda"
