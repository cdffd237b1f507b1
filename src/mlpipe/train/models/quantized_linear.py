"""A linear layer whose weight is kept in few bits (`_core/quantized.py`) and stays as it is: it is spelled
out for each product with it, in the forward pass and for the gradient of the input, and forgotten at once.

N rows · D columns · K blocks of a row · S bytes of a block
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe._core.quantized import (
    BLOCK,
    NF4,
    NF4_BORDERS,
    SCALE_BYTES,
    STEPS,
    Base,
    block_bytes,
    row_bytes,
)

QUANTIZED = "quantized_weight"  # the parameter, instead of `weight`
_CHUNK_ELEMENTS = 2**24  # in fp32 at a time


class QuantizedLinear(nn.Module):
    """In the place of `linear`, with its bias; what the weights are says `take`."""

    quantized_weight: nn.Parameter

    def __init__(self, linear: nn.Linear, base: Base) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.base, self.dtype = base, linear.weight.dtype
        shape = (self.out_features, row_bytes(self.in_features, base))
        codes = torch.zeros(shape, dtype=torch.uint8, device=linear.weight.device)
        self.register_parameter(QUANTIZED, nn.Parameter(codes, requires_grad=False))
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:
        """In fp32; where rows are split over ranks this one's."""
        codes: Any = self.quantized_weight
        return dequantize(
            codes.to_local() if hasattr(codes, "to_local") else codes, self.in_features, self.base
        )

    def product(self, x: Tensor) -> Tensor:
        """x W^T, under autocast in its dtype."""
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        y: Tensor = _Product.apply(x, self.quantized_weight, self.in_features, self.base)  # type: ignore[no-untyped-call]
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    """Keeps the codes alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes_NKS: Tensor, columns: int, base: Base) -> Tensor:
        ctx.save_for_backward(codes_NKS)
        ctx.columns, ctx.base = columns, base
        return F.linear(x, dequantize(codes_NKS, columns, base, x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (codes_NKS,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ dequantize(codes_NKS, ctx.columns, ctx.base, gradient.dtype), None, None, None


def dequantize(codes_NKS: Tensor, columns: int, base: Base, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weights (N, D), computed in fp32. `codes_NKS`: of `quantize`."""
    blocks = codes_NKS.view(len(codes_NKS), -1, block_bytes(base))
    scales = blocks[..., :SCALE_BYTES].contiguous().view(torch.bfloat16).float()
    codes = blocks[..., SCALE_BYTES:]
    if base == "int8":
        values = codes.view(torch.int8).float().mul_(scales / STEPS)
    else:
        values = F.embedding(codes.int(), _pairs(codes)).flatten(2).mul_(scales)
    return values.flatten(1)[:, :columns].to(dtype)


def _pairs(codes: Tensor) -> Tensor:
    """Both values of each byte, (256, 2) on the device of `codes`. Kept: a copy to a GPU waits until that has
    done all that it was told. Traces, whose tensors are none, keep nothing."""
    if type(codes) is not Tensor or torch.compiler.is_compiling():
        return _made_pairs(codes.device)
    if codes.device not in _kept_pairs:
        with torch.inference_mode(False):
            _kept_pairs[codes.device] = _made_pairs(codes.device)
    return _kept_pairs[codes.device]


_kept_pairs: dict[torch.device, Tensor] = {}


def _made_pairs(device: torch.device) -> Tensor:
    return torch.tensor([(first, second) for first in NF4 for second in NF4], device=device)


@torch.no_grad()
def quantize(weights: Tensor, base: Base) -> Tensor:
    """Codes of weights (N, D), uint8, on their device."""
    num_rows, columns = weights.shape
    codes = torch.empty((num_rows, row_bytes(columns, base)), dtype=torch.uint8, device=weights.device)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, num_rows, step):
        codes[start : start + step] = _quantize(weights[start : start + step].float(), base)
    return codes


def _quantize(weights: Tensor, base: Base) -> Tensor:
    blocks = F.pad(weights, (0, -weights.shape[1] % BLOCK)).view(len(weights), -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    ratios = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)
    if base == "int8":
        codes = (ratios * STEPS).round().to(torch.int8).view(torch.uint8)
    else:
        nearest = torch.bucketize(ratios, torch.tensor(NF4_BORDERS, device=ratios.device), out_int32=True)
        codes = (nearest[..., ::2] << 4 | nearest[..., 1::2]).to(torch.uint8)
    return torch.cat((largest.bfloat16().view(torch.uint8), codes), dim=-1).flatten(1)


def quantize_layers(model: nn.Module, names: list[str], base: Base) -> None:
    """Puts one in the place of each of these linear layers. Weights that are there are kept, in few bits."""
    for name in names:
        linear: Any = model.get_submodule(name)
        layer = QuantizedLinear(linear, base)
        if not linear.weight.is_meta:
            layer.quantized_weight.copy_(quantize(linear.weight, base))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """By name."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module
