"""Schedule-free AdamW (Defazio et al., The Road Less Scheduled, 2024, algorithm 1, as the authors'
`AdamWScheduleFree` has it): instead of a falling learning rate an average of all steps so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch

from mlpipe.train.buckets import buckets
from mlpipe.train.optim.update import Average, scaled_gradients
from mlpipe.train.shards import LocalShard

_TOGETHER_BYTES = 2**26  # of parameters whose denominators are there at a time


class ScheduleFreeAdamW:
    """Three series of weights: x, the average, is what is validated and what a checkpoint has as the model's;
    z takes AdamW's steps, without a first moment; y, between the two, is what a pass computes with, and
    follows from them. Matrices decay (at y), vectors do not. One count of updates serves all parameters."""

    def __init__(
        self, shards: Sequence[LocalShard], *, betas: Sequence[float], eps: float, weight_decay: float
    ) -> None:
        self.shards = shards
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.num_updates = 0
        self.largest_lr = 0.0
        self.sum_of_weights = 0.0  # of the average's members
        self._x = {shard.name: shard.local.detach().clone() for shard in shards}
        self._z = {shard.name: shard.local.detach().clone() for shard in shards}
        self._squares = {shard.name: torch.zeros_like(shard.local) for shard in shards}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`. Takes the place of the gradients, which are no
        longer there afterwards."""
        beta2 = self.betas[1]
        self.num_updates += 1
        self.largest_lr = max(self.largest_lr, lr)
        weight = self.largest_lr**2
        self.sum_of_weights += weight
        share = weight / self.sum_of_weights if weight else 0.0
        for pairs in buckets(scaled_gradients(self.shards, scale), _TOGETHER_BYTES, itemgetter(1)):
            names = [shard.name for shard, _ in pairs]
            gradients = [gradient for _, gradient in pairs]
            squares, z = [self._squares[name] for name in names], [self._z[name] for name in names]
            torch._foreach_mul_(squares, beta2)
            torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
            denominators = torch._foreach_div(squares, 1 - beta2**self.num_updates)
            torch._foreach_sqrt_(denominators)
            torch._foreach_add_(denominators, self.eps)
            torch._foreach_div_(gradients, denominators)
            del denominators
            decayed = [(shard.local, gradient) for shard, gradient in pairs if shard.is_decayed]
            if decayed and self.weight_decay:
                weights, of_them = map(list, zip(*decayed, strict=True))
                torch._foreach_add_(of_them, weights, alpha=self.weight_decay)
            torch._foreach_add_(z, gradients, alpha=-lr)
            torch._foreach_lerp_([self._x[name] for name in names], z, share)
            self._interpolate([shard for shard, _ in pairs])

    @torch.no_grad()
    def after_load(self) -> None:
        """Weights to compute with, of the states that a checkpoint has filled."""
        self._interpolate(self.shards)

    def averages(self) -> list[Average]:
        """x of each parameter."""
        return [(shard, self._x[shard.name]) for shard in self.shards]

    def state(self) -> list[LocalShard]:
        """x in the place of the parameters, z, and the second moments."""
        shards = []
        for shard in self.shards:
            shards.append(replace(shard, local=self._x[shard.name], parameter=None))
            shards.append(shard.state("z", self._z[shard.name]))
            shards.append(shard.state("exp_avg_sq", self._squares[shard.name]))
        return shards

    def scalars(self) -> dict[str, Any]:
        """What the next member of the average weighs, and the number of updates."""
        return {
            "num_updates": self.num_updates,
            "largest_lr": self.largest_lr,
            "sum_of_weights": self.sum_of_weights,
        }

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.num_updates = scalars["num_updates"]
        self.largest_lr = scalars["largest_lr"]
        self.sum_of_weights = scalars["sum_of_weights"]

    def _interpolate(self, shards: Sequence[LocalShard]) -> None:
        if shards:
            weights = [shard.local for shard in shards]
            torch._foreach_copy_(weights, [self._z[shard.name] for shard in shards])
            torch._foreach_lerp_(weights, [self._x[shard.name] for shard in shards], self.betas[0])
