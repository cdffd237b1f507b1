"""Model and data that every side imports: a CNN with batch norm on images that are drawn here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

BATCH, LR, SIZE, CLASSES = 64, 5e-3, 16, 4


def block(channels_in: int, channels_out: int) -> nn.Module:
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU(), nn.MaxPool2d(2))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        block(1, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)
    )


def samples(split: str) -> list[dict[str, Tensor]]:
    """A square in one of four sizes, under noise."""
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    found = []
    for i in range(4096 if split == "train" else 512):
        kind = i % CLASSES
        image = 0.3 * torch.randn(1, SIZE, SIZE, generator=draw)
        y, x = torch.randint(0, SIZE - 8, (2,), generator=draw).tolist()
        image[:, y : y + 2 + 2 * kind, x : x + 2 + 2 * kind] += 1.0
        found.append({"inputs": image, "targets": torch.tensor(kind)})
    return found
