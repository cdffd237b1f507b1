"""The products of the blocks' linear layers in float8, forward and backward, each operand with one scale
made from its largest magnitude (Micikevicius et al., FP8 Formats for Deep Learning, 2022): e4m3 for inputs
and weights, e5m2 for gradients. What comes out is bf16. Weights, their gradients and what is kept for the
backward pass are what they are without; there the operands are rounded once more.

Layers whose sides are no multiples of 16, which the kernel needs, stay as they are.

M tokens of the batch · K inputs · N outputs
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlpipe._core.errors import TrainError
from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

_UNIT = 16
_FIRST = (8, 9)  # compute capability: Ada, then Hopper


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Names, classes and values of the parameters stay. Raises TrainError (input)."""
    if world.device.type == "cuda" and torch.cuda.get_device_capability(world.device) < _FIRST:
        raise TrainError(
            f"{torch.cuda.get_device_name(world.device)} multiplies no float8",
            where="train.float8",
            hint="write float8: false, or train on Hopper or later",
            kind="input",
        )
    layers = [
        layer
        for block in model.built.blocks
        for layer in block.modules()
        if type(layer) is nn.Linear and not (layer.in_features % _UNIT or layer.out_features % _UNIT)
    ]
    if not layers:
        raise TrainError(
            f"no block has a linear layer whose sides are multiples of {_UNIT}",
            where="train.float8",
            hint="write float8: false, or name the modules that are blocks in model.blocks",
            kind="input",
        )
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]


def _forward(self: nn.Linear, x: Tensor) -> Tensor:
    if not x.numel():  # such as an expert's without a token: there is no largest magnitude
        return nn.Linear.forward(self, x)
    y_MN = _Product.apply(x.flatten(0, -2).to(torch.bfloat16), self.weight)
    y: Tensor = y_MN.view(*x.shape[:-1], -1)
    return y if self.bias is None else y + self.bias.to(y.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return _product(_to_e4m3(x_MK), _to_e4m3(weight_NK), fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MN: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_MK, weight_NK = ctx.saved_tensors
        grad = quantized(grad_MN, torch.float8_e5m2)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            weight, scale = _to_e4m3(weight_NK)
            grad_x = _product(grad, (weight.t().contiguous(), scale), fast=False)
        if ctx.needs_input_grad[1] and len(x_MK) % _UNIT:  # along which the kernel sums here
            grad_weight = (grad_MN.t() @ x_MK).to(weight_NK.dtype)
        elif ctx.needs_input_grad[1]:
            (low, low_scale), (x, x_scale) = grad, _to_e4m3(x_MK)
            grad_weight = _product(
                (low.t().contiguous(), low_scale), (x.t().contiguous(), x_scale), fast=False
            ).to(weight_NK.dtype)
        return grad_x, grad_weight


def _to_e4m3(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return quantized(tensor, torch.float8_e4m3fn)


def quantized(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """And the fp32 factor that brings it back."""
    most = torch.finfo(dtype).max
    scale = (tensor.abs().amax().float() / most).clamp(min=1e-12)
    return (tensor.float() / scale).clamp_(-most, most).to(dtype).contiguous(), scale


def _product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], *, fast: bool) -> Tensor:
    """left @ right.T, both by rows. `fast`: sums with fewer bits, which gradients do not bear."""
    product: Tensor = torch._scaled_mm(
        left[0],
        right[0].t(),
        scale_a=left[1],
        scale_b=right[1],
        out_dtype=torch.bfloat16,
        use_fast_accum=fast and left[0].is_cuda,
    )
    return product
