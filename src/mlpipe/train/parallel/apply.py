"""The order in which techniques are applied to a model, all of it, in one place:

activation checkpointing -> compile -> shard -> real weights -> replicate.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from mlpipe.plan.plan import TrainPlan
from mlpipe.train.init import (
    copy_weights,
    initialize,
    mark_unwritten,
    refuse_unwritten,
    some_of,
    unwritten,
)
from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel.activations import checkpoint_activations
from mlpipe.train.parallel.ddp import apply_ddp, apply_single
from mlpipe.train.parallel.parallel import Parallel
from mlpipe.train.parallel.zero1 import apply_zero1

_log = logging.getLogger(__name__)


def parallelize(built: BuiltModel, plan: TrainPlan, device: torch.device) -> Parallel:
    """`built.module` may be on the meta device; afterwards its weights are real, the same for a seed
    under every strategy and world size."""
    module, blocks = built.module, built.blocks
    if plan.activation_checkpointing != "none":
        checkpoint_activations(blocks, plan.activation_checkpointing)
    if plan.compile == "model":
        module.compile()
    elif plan.compile != "off":
        for block in blocks:
            block.compile()
        # On a GPU, where memory's speed bounds the loss; a CPU has it in its cache, chunk by chunk.
        module.fused_loss = device.type == "cuda"
    if plan.mesh.dp_shard > 1:
        # imported here: DTensor alone costs 2 s, and a replicated model needs none of it
        from mlpipe.train.parallel import fsdp

        mesh = fsdp.device_mesh(plan, device)
        if not built.on_meta:
            module.to(device)
        fsdp.shard(module, blocks, mesh, plan)
        materialize(built, plan.seed, device)
        return fsdp.finish(module, mesh, plan, device)
    materialize(built, plan.seed, device)
    if plan.mesh.dp_replicate == 1:
        return apply_single(module)
    apply = apply_zero1 if plan.shard_optimizer else apply_ddp
    return apply(module, device)


def materialize(built: BuiltModel, seed: int, device: torch.device) -> None:
    """Real weights on `device`. `_apply` makes one tensor per module attribute, which would untie
    tied parameters: they are tied again afterwards."""
    module = built.module
    if not built.on_meta:
        module.to(device)
        return
    ties = _ties(module)

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if hasattr(tensor, "to_local"):
            return mark_unwritten(torch.empty_like(tensor, device=device))
        # as `to_empty`, whose `empty_like` of a meta tensor imports sympy: 0.6 CPU seconds a rank
        return mark_unwritten(
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        )

    module._apply(empty)
    for (owner, name), *others in ties:
        for other, other_name in others:
            other._parameters[other_name] = owner._parameters[name]
    initialize(built.model, seed)
    if _anywhere(missing := unwritten(built.model), built.model):
        _fill_rest(built, seed, missing)


def _anywhere(missing: list[str], model: nn.Module) -> bool:
    """The same on every rank: of a split tensor some may hold nothing that is missing."""
    if not any(hasattr(parameter, "to_local") for parameter in model.parameters()):
        return bool(missing)
    found = torch.tensor(len(missing))
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found)


def _fill_rest(built: BuiltModel, seed: int, missing: list[str]) -> None:
    """As in plain PyTorch: what the constructor gives, and init_weights() over it."""
    entry = built.module.entry
    if missing:  # else it is in another rank's part
        _log.warning(
            "init_weights() of %s does not fill %s: every rank builds the model for real once, on the CPU",
            entry,
            some_of(missing),
        )
    copy_weights(built.construct(), built.model)
    initialize(built.model, seed)
    refuse_unwritten(built.model, entry)


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [found for found in places.values() if len(found) > 1]
