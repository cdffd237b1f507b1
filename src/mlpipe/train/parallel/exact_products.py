"""Products of which each rank has a part of the sum, for ranks that add exactly (`TrainPlan.exact_sums`): of
operands in bf16 or fp16, with parts in fp32. The sum is rounded, as that of one rank is.

O outputs · I inputs (of this rank)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe.train.precision import low_dtype


def part_of_sum(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in fp32, where a rank has a part of the inputs (.., I)."""
    low = low_dtype(x)
    product: Tensor = _PartOfSum.apply(x.to(low), weight_OI.to(low))
    return product


def part_of_outputs(
    own: Tensor, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, add: Callable[[Tensor], Tensor]
) -> Tensor:
    """x W^T + b of `x` (.., I), where a rank has a part of the outputs. The gradient goes to `own`, which `x`
    was made of: what `add` makes of the rank's part (N, I) of it."""
    low = x.dtype
    bias = None if bias_O is None else bias_O.to(low)
    product: Tensor = _PartOfOutputs.apply(own, x, weight_OI.to(low), bias, add)
    return product


def _in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """A CPU has no such kernel; there numbers of few bits are made fp32 first, in which they are the same."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float()


class _PartOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        return _in_fp32(x.flatten(0, -2), weight_OI.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # which the sum has
        return (
            gradient @ weight_OI if ctx.needs_input_grad[0] else None,
            gradient.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None,
        )


class _PartOfOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        add: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.add, ctx.shape = add, own.shape
        return F.linear(x, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        own = None
        if ctx.needs_input_grad[0]:
            own = ctx.add(_in_fp32(gradient_NO, weight_OI)).to(x.dtype).view(ctx.shape)
        of_weight = gradient_NO.t() @ x.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return own, None, of_weight, gradient_NO.sum(0) if ctx.needs_input_grad[3] else None, None
