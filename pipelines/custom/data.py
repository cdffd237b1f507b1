"""Points on noisy spirals, one spiral a class. Nothing here knows of mlpipe.

What mlpipe asks for: a function that takes `split` ("train" or "validation") besides its own args and
returns something with `len()` and `[i] -> dict of tensors`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Spirals(Dataset[dict[str, Tensor]]):
    def __init__(self, num_samples: int, num_classes: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.classes = torch.arange(num_samples) % num_classes
        radius = torch.rand(num_samples, generator=draw)
        angle = 2 * math.pi * (self.classes / num_classes + radius)
        noise = 0.03 * torch.randn(num_samples, 2, generator=draw)
        self.points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1) + noise

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.points[index], "targets": self.classes[index]}


def spirals(num_samples: int, num_classes: int, split: str = "train") -> Spirals:
    return Spirals(num_samples, num_classes, seed=1 if split == "train" else 2)
