"""AdamW (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from mlpipe.train.optim.update import scaled_gradients
from mlpipe.train.shards import LocalShard


class AdamW:
    """By the kernel of `torch.optim.AdamW(fused=True)`. Its class would import dynamo, with 900 modules, for
    its first step: 3 CPU seconds of every rank's start. That this is the same is tested over 100 steps.

    Matrices decay, vectors (norms, biases) do not. One count of updates serves the bias correction of all
    parameters, so that one which had no gradient in some step resumes as it would go on.
    """

    def __init__(
        self, shards: Sequence[LocalShard], *, betas: Sequence[float], eps: float, weight_decay: float
    ) -> None:
        self.shards = shards
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.num_updates = 0
        device = shards[0].local.device if shards else None
        self.count = torch.zeros((), dtype=torch.float32, device=device)  # `num_updates`, for the kernel
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update with the gradients multiplied by `scale`."""
        self.num_updates += 1
        self.count += 1
        groups: dict[Any, list[tuple[LocalShard, torch.Tensor]]] = defaultdict(list)
        for shard, gradient in scaled_gradients(self.shards, scale):
            groups[shard.is_decayed, shard.local.dtype].append((shard, gradient))
        for (decays, _), group in groups.items():
            moments = [self._moments_of(shard) for shard, _ in group]
            torch._fused_adamw_(
                [shard.local for shard, _ in group],
                [gradient for _, gradient in group],
                [mean for mean, _ in moments],
                [square for _, square in moments],
                [],
                [self.count] * len(group),
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=self.weight_decay if decays else 0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
            )

    def state(self) -> list[LocalShard]:
        """The two moments of each parameter."""
        return [
            shard.state(kind, moment)
            for shard in self.shards
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments_of(shard), strict=True)
        ]

    def scalars(self) -> dict[str, Any]:
        """The number of updates, which corrects the moments' bias."""
        return {"num_updates": self.num_updates}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.num_updates = scalars["num_updates"]
        self.count.fill_(self.num_updates)

    def _moments_of(self, shard: LocalShard) -> tuple[torch.Tensor, torch.Tensor]:
        if shard.name not in self._moments:
            self._moments[shard.name] = (torch.zeros_like(shard.local), torch.zeros_like(shard.local))
        return self._moments[shard.name]
