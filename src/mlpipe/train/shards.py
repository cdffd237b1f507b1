"""What a rank holds of a tensor: the one thing that techniques, optimizers and checkpoints tell each other.

The optimizer never sees a DTensor: each rank updates plain local tensors, views of the storage it owns.
That is one code path for replicated and sharded training and keeps DTensor's dispatch out of the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass
class LocalShard:
    """The part of one tensor that this rank updates (parameters, states) or at least stores (`is_buffer`: a
    forward may write it at any time).

    `local` is a view of the live storage. It covers `offset` .. `offset + local.shape` of the global tensor
    of shape `shape`. `num_replicas` ranks hold this very part, this one being number `replica_id` of them.
    `parameter`: the module's own, whose `grad` is there after a backward. `full_gradient`: that gradient has
    the parameter's global shape although only this part is updated (zero1).
    """

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica_id: int = 0
    num_replicas: int = 1
    parameter: nn.Parameter | None = None
    full_gradient: bool = False
    is_buffer: bool = False

    def gradient(self) -> torch.Tensor | None:
        """Of `local`, after a backward; None where the parameter took no part in it."""
        gradient: Any = self.parameter.grad if self.parameter is not None else None
        if gradient is None:
            return None
        if hasattr(gradient, "to_local"):
            gradient = gradient.to_local()
        elif self.full_gradient:
            gradient = gradient[self.offset[0] : self.offset[0] + self.local.shape[0]]
        own: torch.Tensor = gradient
        return own

    def state(self, kind: str, local: torch.Tensor) -> LocalShard:
        """A state of the optimizer that has the shape of this parameter and is split like it."""
        name = f"optim.{self.name}.{kind}"
        return LocalShard(name, local, self.shape, self.offset, self.replica_id, self.num_replicas)


def clear_gradients(shards: Iterable[LocalShard]) -> None:
    """So that the next backward does not add to them."""
    for shard in shards:
        if shard.parameter is not None:
            shard.parameter.grad = None
