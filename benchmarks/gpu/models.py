"""The benchmark's models, built by `build` as a user's own model is: GPT-2 as it was published (LayerNorm,
GELU, learned positions, biases, a tied head), mlpipe's Llama, also with several samples in a row, and either
with its blocks' matmuls in float8.

B batch · T tokens · D dim · H heads · C channels of a head · M tokens of the batch · K inputs · N outputs
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.presets import LlamaConfig
from mlpipe.train.models import llama


def build(
    architecture: str, float8: bool, documents: Sequence[int] | None = None, **fields: Any
) -> nn.Module:
    """`architecture`: "gpt2" (fields of `GPT2`) or "llama" (fields of `LlamaConfig`). `documents`: tokens of
    the samples that the rows of a pass hold behind each other."""
    if documents is not None:
        return PackedLlama(LlamaConfig(**fields), documents)
    model = GPT2(**fields) if architecture == "gpt2" else llama.build_model(**fields)
    if float8:
        for block in model.layers:
            _to_float8(block)
    return model


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


class Float8Linear(nn.Linear):
    """Forward and backward matmuls in float8 with one scale a tensor, made from its largest magnitude at each
    use (e4m3 for inputs and weights, e5m2 for gradients); results in bf16, the weight stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        y_MN = _Float8Matmul.apply(x.reshape(-1, x.shape[-1]).to(torch.bfloat16), self.weight)
        y = y_MN.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        x, x_scale = _to_8_bits(x_MK, torch.float8_e4m3fn)
        weight, weight_scale = _to_8_bits(weight_NK, torch.float8_e4m3fn)
        ctx.save_for_backward(x, x_scale, weight, weight_scale)
        ctx.weight_dtype = weight_NK.dtype
        return _matmul(x, weight.t(), x_scale, weight_scale, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor, Tensor]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad, grad_scale = _to_8_bits(grad_MN, torch.float8_e5m2)
        # the kernel takes its first operand by rows and its second by columns
        grad_x = _matmul(grad, weight.t().contiguous().t(), grad_scale, weight_scale, fast=False)
        grad_weight = _matmul(grad.t().contiguous(), x.t().contiguous().t(), grad_scale, x_scale, fast=False)
        return grad_x, grad_weight.to(ctx.weight_dtype)


def _to_8_bits(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """And the fp32 factor that brings it back."""
    most = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / most).clamp(min=1e-12)
    return (tensor.float() / scale).clamp(-most, most).to(dtype).contiguous(), scale


def _matmul(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, *, fast: bool) -> Tensor:
    return torch._scaled_mm(
        left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


def _to_float8(module: nn.Module) -> None:
    """All its matrices whose sides are multiples of 16, which the kernel needs."""
    for child in module.modules():
        if type(child) is nn.Linear and not (child.in_features % 16 or child.out_features % 16):
            child.__class__ = Float8Linear
