"""A small model and a data set that take their time: for runs whose metrics are looked at."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Paced(nn.Module):
    """`slow`: that rank takes twice as long. Once the file `poison` is there, the loss is not finite."""

    def __init__(self, seconds: float, slow: int | None = None, poison: str = "") -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, 256)
        self.seconds = seconds * (2 if int(os.environ["RANK"]) == slow else 1)
        self.poison = Path(poison) if poison else None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits * float("nan") if self.poison is not None and self.poison.exists() else logits


def build_model(**args: Any) -> nn.Module:
    return Paced(**args)


class Counting:
    """Sequences that count up, each after `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        numbers = (torch.arange(33) + index) % 256
        return {"inputs": numbers[:-1], "targets": numbers[1:]}


def build_dataset(split: str, seconds: float) -> Counting:
    return Counting(seconds)
