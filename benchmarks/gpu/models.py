"""The benchmark's models, built by `build` as a user's own model is: GPT-2 as it was published (LayerNorm,
GELU, learned positions, biases, a tied head), and mlpipe's Llama, also with several samples in a row.

B batch · T tokens · D dim · H heads · C channels of a head · M tokens of the batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.presets import LlamaConfig
from mlpipe.train.models import llama


def build(architecture: str, documents: Sequence[int] | None = None, **fields: Any) -> nn.Module:
    """`architecture`: "gpt2" (fields of `GPT2`) or "llama" (fields of `LlamaConfig`). `documents`: tokens of
    the samples that the rows of a pass hold behind each other."""
    if documents is not None:
        return PackedLlama(LlamaConfig(**fields), documents)
    return GPT2(**fields) if architecture == "gpt2" else llama.build_model(**fields)


class GPT2(nn.Module):
    """Radford et al., 2019. The vocabulary is padded to 50,304 where 50,257 would slow the head down."""

    def __init__(self, dim: int, num_layers: int, num_heads: int, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, dim)
        self.wpe = nn.Embedding(max_seq_len, dim)
        self.layers = nn.ModuleList(Block(dim, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)

    def init_weights(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                writes_residual = name.endswith("proj.weight")
                nn.init.normal_(
                    parameter, std=0.02 / (2 * len(self.layers)) ** 0.5 if writes_residual else 0.02
                )

    def forward(self, inputs_BT: Tensor) -> Tensor:
        positions = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        x_BTD = self.wte(inputs_BT) + self.wpe(positions)
        for block in self.layers:
            x_BTD = block(x_BTD)
        return F.linear(self.norm(x_BTD), self.wte.weight)


class PackedLlama(llama.Llama):
    """Takes the rows of a pass for one, in which samples of these lengths lie, as mlpipe packs them."""

    lengths_N: Tensor

    def __init__(self, config: LlamaConfig, lengths: Sequence[int]) -> None:
        super().__init__(config)
        self.lengths = tuple(lengths)
        self.register_buffer("lengths_N", torch.tensor(self.lengths), persistent=False)

    def init_weights(self) -> None:
        super().init_weights()
        self.lengths_N.copy_(torch.tensor(self.lengths))

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        logits_1MV = super().forward(inputs.reshape(1, -1), document_lengths=self.lengths_N)
        return logits_1MV.view(*inputs.shape, -1)


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.attention_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down_proj = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        num_samples, num_tokens, dim = x_BTD.shape
        qkv = self.qkv(self.norm_1(x_BTD)).view(num_samples, num_tokens, 3, self.num_heads, -1)
        q_BHTC, k_BHTC, v_BHTC = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHTC, v_BHTC, is_causal=True)
        x_BTD = x_BTD + self.attention_proj(y_BHTC.transpose(1, 2).reshape(num_samples, num_tokens, dim))
        return x_BTD + self.down_proj(F.gelu(self.up(self.norm_2(x_BTD)), approximate="tanh"))
