"""A classifier of points in the plane. Nothing here knows of mlpipe.

What mlpipe asks for: `build_model(**args)` returns an nn.Module, and that either maps inputs to logits or,
as here, has `loss(batch) -> (sum, count)`. The ModuleList `layers` is what FSDP shards, activation
checkpointing wraps and torch.compile compiles.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, num_classes: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(2, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, num_classes)

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The summed loss of a batch, and how many samples it is the sum of."""
        logits, targets = self(batch["inputs"]), batch["targets"]
        return F.cross_entropy(logits.float(), targets, reduction="sum"), torch.tensor(targets.numel())


def build_model(num_classes: int, width: int, num_layers: int) -> nn.Module:
    return Classifier(num_classes, width, num_layers)
