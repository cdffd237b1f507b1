"""Models and data that waste time, each in a way of its own that a profile must name."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Wasteful(nn.Module):
    """Between two matmuls, `wastes`: x -> x."""

    def __init__(self, wastes: nn.Module, vocab_size: int = 256, dim: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList([nn.Linear(dim, dim), wastes, nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class Syncs(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if sum(row.sum().item() for row in x) < float("inf") else x * 0


class Tiny(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        small = torch.ones(4)
        for _ in range(2000):
            small = small * 1.0001
        return x * small.mean()


class Copies(nn.Module):
    """32 MiB there and back."""

    def __init__(self) -> None:
        super().__init__()
        # No buffers: those travel. No new memory: it is filled first where a training is deterministic, and
        # the first touch of its pages may take longer than all copies.
        self.big, self.wide = torch.ones(2**23), torch.ones(2**23, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            self.wide.copy_(self.big)
            self.big.copy_(self.wide)
        return x + self.big[0] * 0


class Lags(nn.Module):
    """Of the last rank."""

    def forward(self, x: Tensor) -> Tensor:
        if dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(0.5)  # it is what it does, no way to wait for anything
        return x * 1.0


def build(wastes: str) -> nn.Module:
    kinds: dict[str, type[nn.Module]] = {"syncs": Syncs, "tiny": Tiny, "copies": Copies, "lags": Lags}
    return Wasteful(kinds.get(wastes, nn.Identity)())


def crowded() -> nn.Module:
    """On far more threads than there are CPUs."""
    torch.set_num_threads(64)
    return Wasteful(nn.Identity())


class Starved:
    """Takes its time for each sample."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        time.sleep(0.03)  # as above
        tokens = torch.arange(i, i + 33) % 256
        return {"inputs": tokens[:-1], "targets": tokens[1:]}


def starved(split: str) -> Starved:
    return Starved()
