"""Stochastic gradient descent with momentum (Sutskever et al., 2013), by torch's own class."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mlpipe.train.optim.torch_optimizer import TorchOptimizer
from mlpipe.train.shards import LocalShard


def sgd(shards: Sequence[LocalShard], *, momentum: float, weight_decay: float) -> TorchOptimizer:
    """`torch.optim.SGD`. As with AdamW matrices decay and vectors do not."""

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        # it is made again for some of them; a parameter has the dims of its shard
        decayed = {len(shard.shape) for shard in shards if shard.is_decayed}
        groups = [
            {"params": [p for p in parameters if p.dim() in decayed], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() not in decayed], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, momentum=momentum, foreach=True)

    return TorchOptimizer(shards, build, "sgd")
