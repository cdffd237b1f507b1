"""A small model that takes its time, and more of it on one rank: for runs whose metrics are looked at."""

from __future__ import annotations

import os
import time

import torch
from torch import nn


class Paced(nn.Module):
    def __init__(self, seconds: float, slow_rank: int, slow_seconds: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, 256)
        self.seconds = slow_seconds if int(os.environ["RANK"]) == slow_rank else seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        x = self.embed(inputs)
        for block in self.blocks:
            x = x + block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def build_model(seconds: float, slow_rank: int = -1, slow_seconds: float = 0.0) -> nn.Module:
    return Paced(seconds, slow_rank, slow_seconds)
