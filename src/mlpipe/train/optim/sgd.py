"""Stochastic gradient descent with momentum (Sutskever et al., 2013)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlpipe._core.errors import TrainError
from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard


class SGD:
    """By the operators of `torch.optim.SGD(foreach=True)`. Its class would import dynamo for its first step:
    3 CPU seconds of every rank's start, and 150 MiB. That this is the same, bit for bit, is tested over 100
    steps. As with AdamW matrices decay and vectors do not.
    """

    def __init__(self, shards: Sequence[LocalShard], *, momentum: float, weight_decay: float) -> None:
        self.shards = shards
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._sums: dict[str, torch.Tensor] = {}
        self._without: set[str] = set()  # which have never had a gradient, so that a checkpoint has no sum

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        pairs = scaled_gradients(self.shards, scale)
        if not pairs:
            return
        decayed = [pair for pair in pairs if pair[0].is_decayed] if self.weight_decay else []
        if decayed:
            weights, gradients = [shard.local for shard, _ in decayed], [gradient for _, gradient in decayed]
            torch._foreach_add_(gradients, weights, alpha=self.weight_decay)
        directions = [gradient for _, gradient in pairs]
        if self.momentum:
            sums = [self._sum_of(shard) for shard, _ in pairs]
            torch._foreach_mul_(sums, self.momentum)
            torch._foreach_add_(sums, directions)
            directions = sums
            self._without.difference_update(shard.name for shard, _ in pairs)
        torch._foreach_add_([shard.local for shard, _ in pairs], directions, alpha=-lr)

    def state(self) -> list[LocalShard]:
        """The sums of gradients, unless `momentum` is 0."""
        kept = [shard for shard in self.shards if self.momentum and shard.name not in self._without]
        return [shard.state("momentum_buffer", self._sum_of(shard)) for shard in kept]

    def scalars(self) -> dict[str, Any]:
        """Whether there are sums."""
        return {"momentum": self.momentum, "without": sorted(self._without)}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them, or as `torch.optim.SGD`, which it was once, did. Raises TrainError (input)
        where there are sums now and were none, or the other way round."""
        former: dict[str, Any] | None = scalars.get("state")  # by parameter
        had = bool(scalars["momentum"]) if former is None else any(former.values())
        if had != bool(self.momentum):
            kept, keeps = ("momentum_buffer", "nothing") if had else ("nothing", "momentum_buffer")
            raise TrainError(
                f"the checkpoint's optimizer kept {kept}, sgd keeps {keeps} with momentum {self.momentum:g}",
                hint="resume with the optimizer and the arguments that wrote it, or start a new run",
                kind="input",
            )
        names = {shard.name for shard in self.shards}
        self._without = set(scalars["without"]) if former is None else names - former.keys()

    def _sum_of(self, shard: LocalShard) -> torch.Tensor:
        if shard.name not in self._sums:
            self._sums[shard.name] = torch.zeros_like(shard.local)
        return self._sums[shard.name]
