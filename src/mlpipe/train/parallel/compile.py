"""torch.compile: each block by itself, or the whole model with its loss as one graph."""

from __future__ import annotations

import torch

from mlpipe.plan.work import TrainPlan
from mlpipe.train.models.moe import Experts
from mlpipe.train.parallel.activation_checkpointing import compile_what_is_recomputed
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Marks what is compiled at the first forward. Experts on several ranks compute as they are: how many
    rows come to them no graph knows, so a block has one graph before them and one behind. As what is
    recomputed is one whole graph or none, these are made inside it then."""
    apart = [one for one in model.built.model.modules() if isinstance(one, Experts) and one.exchange]
    for experts in apart:
        experts.exchange = torch.compiler.disable(experts.exchange)
    if plan.compile == "model":
        model.built.module.compile()
        return
    for block in model.built.blocks:
        if apart and plan.activation_checkpointing != "none":
            compile_what_is_recomputed(block)
        else:
            block.compile()
    # On a GPU, where memory's speed bounds the loss; a CPU has it in its cache, chunk by chunk.
    model.built.module.fused_loss = world.device.type == "cuda"
