"""The model of every side: a plain GPT as its user would write it, learned positions, LayerNorm, GELU.

B batch · T tokens · D dim · H heads · V vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], self.num_heads, -1)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x_BTD)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(y.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.norm_2(x_BTD))))


class GPT(nn.Module):
    def __init__(self, vocab_size: int, dim: int, num_layers: int, num_heads: int, seq_len: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.positions = nn.Parameter(torch.zeros(seq_len, dim))
        self.layers = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and name != "positions":
                nn.init.normal_(parameter, std=0.02)

    def forward(self, inputs_BT: Tensor) -> Tensor:
        """Token ids -> logits (B, T, V)."""
        x_BTD = self.embed(inputs_BT) + self.positions[: inputs_BT.shape[1]]
        for block in self.layers:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


def build_model(**shape: int) -> GPT:
    return GPT(**shape)
