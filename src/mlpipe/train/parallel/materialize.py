"""Real weights: the same for a seed, whatever the mesh."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import nn

from mlpipe.plan.work import TrainPlan
from mlpipe.train.init import (
    copy_weights,
    initialize,
    mark_unwritten,
    refuse_unwritten,
    some_of,
    unwritten,
)
from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, local_shards
from mlpipe.train.world import World

_log = logging.getLogger(__name__)


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Gives the model its weights, and lists the tensors that this rank updates and stores."""
    materialize(model.built, plan.seed, world.device)
    model.shards = local_shards(model.built.module, world, model.built.blocks, model.waits)


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
    most = torch.tensor(len(missing))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return bool(most)


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
    initialize(built.model, seed, again=True)
    refuse_unwritten(built.model, entry)


def _ties(module: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((owner, name))
    return [owners for owners in places.values() if len(owners) > 1]
