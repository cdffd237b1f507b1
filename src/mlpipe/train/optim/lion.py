"""Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1): the sign of a running
mean of the gradient, and half of AdamW's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard


class Lion:
    """Matrices decay, vectors (norms, biases) do not."""

    def __init__(self, shards: Sequence[LocalShard], *, betas: Sequence[float], weight_decay: float) -> None:
        self.shards = shards
        self.betas = betas
        self.weight_decay = weight_decay
        self._means = {shard.name: torch.zeros_like(shard.local) for shard in shards}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        share, decay = self.betas
        for shard, gradient in scaled_gradients(self.shards, scale):
            mean = self._means[shard.name]
            update = mean * share
            update.add_(gradient, alpha=1 - share).sign_()
            if shard.is_decayed and self.weight_decay:
                shard.local.mul_(1 - lr * self.weight_decay)
            shard.local.add_(update, alpha=-lr)
            mean.mul_(decay).add_(gradient, alpha=1 - decay)

    def state(self) -> list[LocalShard]:
        """The running means."""
        return [shard.state("exp_avg", self._means[shard.name]) for shard in self.shards]

    def scalars(self) -> dict[str, Any]:
        """Nothing besides."""
        return {}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Nothing to take."""
