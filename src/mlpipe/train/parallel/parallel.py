"""What every technique hands to the loop, so that the loop, the optimizer and the checkpoint know none.

The optimizer never sees a DTensor: each rank updates plain local tensors, views of the storage it owns.
That is one code path for replicated and sharded training and keeps DTensor's dispatch out of the step.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from mlpipe.train.parallel.waits import Waits


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


@dataclass
class Parallel:
    """A module made parallel.

    `module(batch)` gives (loss sum, target count) of this rank's microbatch. After the backward of the
    last microbatch the gradients are the mean over the data ranks. `communicate(last)` is entered around
    each microbatch: gradients travel only in the last one. `gradients()` are the local tensors of which
    the squared norms, summed over the world and divided by `norm_copies`, make the global squared norm.
    `after_step()` brings the updated parameters to every rank that computes with them. `waits` counts the
    time that all of these spend waiting for other ranks.
    """

    module: nn.Module
    owned: list[Owned]
    communicate: Callable[[bool], AbstractContextManager[None]]
    gradients: Callable[[], list[torch.Tensor]]
    norm_copies: int
    after_step: Callable[[], None]
    waits: Waits = field(default_factory=Waits)

    def tied(self) -> dict[str, str]:
        """Further names of tied parameters, and the one under which each is stored."""
        stored = {id(item.parameter): item.name for item in self.owned if item.parameter is not None}
        found = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            name = name.removeprefix("module.")  # DDP's
            if stored.get(id(parameter), name) != name:
                found[name] = stored[id(parameter)]
        return found


def replicated(module: nn.Module, rank: int, world_size: int) -> list[Owned]:
    """Every rank holds every parameter and persistent buffer whole."""
    owned = [
        Owned(
            name,
            parameter.detach(),
            tuple(parameter.shape),
            (0,) * parameter.dim(),
            world_size,
            rank,
            parameter,
        )
        for name, parameter in module.named_parameters()
    ]
    return owned + persistent_buffers(module, rank, world_size)


def persistent_buffers(module: nn.Module, rank: int, world_size: int) -> list[Owned]:
    """Buffers that belong to a checkpoint. No technique here shards them."""
    stored = module.state_dict(keep_vars=True)
    return [
        Owned(name, buffer, tuple(buffer.shape), (0,) * buffer.dim(), world_size, rank, is_buffer=True)
        for name, buffer in module.named_buffers()
        if name in stored
    ]


def nothing() -> None:
    """For techniques whose parameters are where they belong after the step."""
