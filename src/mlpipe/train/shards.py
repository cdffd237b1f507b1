"""What a rank holds of a tensor: the one thing that techniques, optimizers and checkpoints tell each other.

The optimizer never sees a DTensor: each rank updates plain local tensors, views of the storage it owns.
That is one code path for replicated and sharded training and keeps DTensor's dispatch out of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

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
