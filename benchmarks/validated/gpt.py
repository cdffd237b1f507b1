"""Model and data that every side imports: a small GPT on token ids most of which follow from the last one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.peers.gpt import build_model

BATCH, LR, SEQ_LEN, CLASSES = 16, 1e-3, 128, 1024


def build() -> nn.Module:
    torch.manual_seed(0)
    return build_model(vocab_size=CLASSES, dim=128, num_layers=4, num_heads=4, seq_len=SEQ_LEN)


def samples(split: str) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    found = []
    for _ in range(2048 if split == "train" else 64):
        ids = torch.randint(CLASSES, (SEQ_LEN + 1,), generator=draw)
        for i in range(1, SEQ_LEN + 1):
            if i % 5:
                ids[i] = (ids[i - 1] * 5 + 17) % CLASSES
        found.append({"inputs": ids[:-1], "targets": ids[1:]})
    return found
