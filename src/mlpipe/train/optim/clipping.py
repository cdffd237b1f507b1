"""Clipping by the global norm of the gradient (Pascanu et al., 2013)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

from mlpipe.train.shards import LocalShard


def squared_norm(shards: Iterable[LocalShard]) -> torch.Tensor:
    """Of this rank's part of the gradient, such that the sum over all ranks is the square of the global norm
    on any mesh: a part that several ranks hold counts by its share on each of them. An fp64 scalar on the
    shards' device, also where none has a gradient: all that a pipeline's stage has may be frozen."""
    by_replicas: dict[int, list[torch.Tensor]] = defaultdict(list)
    device = None
    for shard in shards:
        device = shard.local.device
        gradient = shard.gradient()
        if gradient is not None and not shard.is_copy:
            by_replicas[shard.num_replicas].append(gradient)
    squares = [
        torch.stack(torch._foreach_norm(gradients)).double().square().sum() / num_replicas
        for num_replicas, gradients in by_replicas.items()
    ]
    if not squares:
        return torch.zeros((), dtype=torch.float64, device=device)
    return squares[0] if len(squares) == 1 else torch.stack(squares).sum()


def clip_factor(norm: float, limit: float) -> float:
    """By which gradients of this global norm are multiplied so that it is at most `limit`; 0 sets none."""
    return limit / (norm + 1e-6) if limit and norm > limit else 1.0


@torch.no_grad()
def clip_values(shards: Iterable[LocalShard], limit: float) -> None:
    """Cuts every value of this rank's part of the gradient to at most `limit`, and to at least its opposite,
    in place (torch.nn.utils.clip_grad_value_)."""
    gradients = [gradient for shard in shards if (gradient := shard.gradient()) is not None]
    if gradients:
        torch._foreach_clamp_min_(gradients, -limit)
        torch._foreach_clamp_max_(gradients, limit)
