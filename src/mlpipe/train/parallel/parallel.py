"""What the techniques make of a model, so that the loop, the optimizer and the checkpoint know none of them.

The optimizer never sees a DTensor: each rank updates plain local tensors, views of the storage it owns.
That is one code path for replicated and sharded training and keeps DTensor's dispatch out of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mlpipe.train.model import BuiltModel
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.world import World


@dataclass
class Owned:
    """The part of one tensor that this rank updates (parameters) or at least stores (`is_buffer`: a forward
    may write it at any time).

    `local` is a view of the live storage; it covers the box `offset` .. `offset + local.shape` of the
    global `shape`. `num_copies` ranks hold the same box, this one being number `copy`. `full_gradient`:
    `parameter.grad` has the parameter's global shape although only our box is updated (zero1).
    """

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    num_copies: int
    copy: int
    parameter: nn.Parameter | None = None
    full_gradient: bool = False
    is_buffer: bool = False


def no_gradient_sync(last: bool) -> AbstractContextManager[None]:
    """For one rank, which has nobody to send gradients to."""
    return nullcontext()


def nothing() -> None:
    """For techniques whose parameters are where they belong after the step."""


@dataclass
class ParallelizedModel:
    """A model with the techniques applied to it.

    `module(batch)` gives (loss sum, target count) of this rank's microbatch; it is `built.module`, or what a
    technique wrapped around it. `gradient_sync(last)` is entered around each microbatch; after the backward
    of the last one the gradients are the mean over the data ranks. `after_step()` brings the updated
    parameters to every rank that computes with them. `waits` counts the time that all of these spend waiting
    for other ranks. `owned`: what this rank updates and stores.
    """

    built: BuiltModel
    module: nn.Module
    waits: Waits = field(default_factory=Waits)
    owned: list[Owned] = field(default_factory=list)
    gradient_sync: Callable[[bool], AbstractContextManager[None]] = no_gradient_sync
    after_step: Callable[[], None] = nothing
    norm_copies: int = 1

    def gradients(self) -> list[torch.Tensor]:
        """The local tensors of which the squared norms, summed over the world and divided by `norm_copies`,
        make the global squared norm."""
        return [_local(p.grad) for p in self.built.module.parameters() if p.grad is not None]

    def tied(self) -> dict[str, str]:
        """Further names of tied parameters, and the one under which each is stored."""
        stored = {id(item.parameter): item.name for item in self.owned if item.parameter is not None}
        parameters = self.built.module.named_parameters(remove_duplicate=False)
        return {
            name: stored[id(parameter)]
            for name, parameter in parameters
            if stored.get(id(parameter), name) != name
        }


def owned_tensors(module: nn.Module, world: World) -> list[Owned]:
    """Every parameter, whole or the part that DTensor gives this rank, and every persistent buffer."""
    parameters = [_parameter(name, parameter, world) for name, parameter in module.named_parameters()]
    return parameters + persistent_buffers(module, world)


def _parameter(name: str, parameter: nn.Parameter, world: World) -> Owned:
    shape, offset, split = tuple(parameter.shape), (0,) * parameter.dim(), []
    local = _local(parameter).detach()
    if hasattr(parameter, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        axes = zip(parameter.device_mesh.mesh_dim_names, parameter.placements, strict=True)
        split = [axis for axis, placement in axes if placement.is_shard()]
        if local.numel():  # else the offset of nothing, which is 0
            _, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
    copy, num_copies = world.replica(*split)
    return Owned(name, local, shape, tuple(offset), num_copies, copy, parameter)


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def persistent_buffers(module: nn.Module, world: World) -> list[Owned]:
    """Buffers that belong to a checkpoint. No technique here shards them."""
    stored = module.state_dict(keep_vars=True)
    copy, num_copies = world.replica()
    return [
        Owned(name, buffer, tuple(buffer.shape), (0,) * buffer.dim(), num_copies, copy, is_buffer=True)
        for name, buffer in module.named_buffers()
        if name in stored
    ]
