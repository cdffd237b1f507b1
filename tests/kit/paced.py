"""A small model and a data set that take their time: for runs whose metrics are looked at."""

from __future__ import annotations

import time

import torch
from torch import nn


class Paced(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, 256)
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def build_model(seconds: float) -> nn.Module:
    return Paced(seconds)


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
