"""Products of which each rank has a part of the sum, for ranks that add exactly (`TrainPlan.exact_sums`): of
operands in bf16 or fp16, with parts in fp32. The sum is rounded, as that of one rank is.

O outputs · I inputs (of this rank)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlpipe.train.precision import low_dtype


def part_of_sum(x: Tensor, linear: nn.Module) -> Tensor:
    """x W^T in fp32, where a rank has a part of the inputs (.., I), and `linear` the columns W of these."""
    product: Tensor = _PartOfSum.apply(x.to(low_dtype(x)), linear.weight, _deferred(linear))
    return product


def part_of_outputs(own: Tensor, x: Tensor, linear: nn.Module, add: Callable[[Tensor], Tensor]) -> Tensor:
    """x W^T + b of `x` (.., I), where a rank has a part of the outputs, and `linear` the rows W of these; an
    embedding has no b. The gradient goes to `own`, which `x` was made of: what `add` makes of the rank's part
    (N, I) of it."""
    bias_O = getattr(linear, "bias", None)
    bias_O = None if bias_O is None else bias_O.to(x.dtype)
    product: Tensor = _PartOfOutputs.apply(own, x, linear.weight, bias_O, (add, _deferred(linear)))
    return product


def _deferred(linear: nn.Module) -> Any:
    """Who puts off the gradients of its weights (schedules/deferred_weights.py); None: nobody."""
    return linear.__dict__.get("_deferred")


def _in_fp32(left: Tensor, right: Tensor) -> Tensor:
    """A CPU has no such kernel; there numbers of few bits are made fp32 first, in which they are the same."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    with torch.autocast(left.device.type, enabled=False):
        return left.float() @ right.float()


def _weight_gradient(ctx: Any, inputs: Tensor, gradient: Tensor) -> Tensor | None:
    """None: it is put off."""
    if ctx.deferred is not None and ctx.deferred.takes(ctx.weight, inputs, gradient):
        return None
    return (gradient.flatten(0, -2).t() @ inputs.flatten(0, -2)).to(ctx.weight.dtype)


class _PartOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, deferred: Any) -> Tensor:
        low_OI = weight_OI.to(x.dtype)
        ctx.save_for_backward(x, low_OI)
        ctx.weight, ctx.deferred = weight_OI, deferred
        return _in_fp32(x.flatten(0, -2), low_OI.t()).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, low_OI = ctx.saved_tensors
        gradient = gradient.to(x.dtype)  # which the sum has
        return (
            gradient @ low_OI if ctx.needs_input_grad[0] else None,
            _weight_gradient(ctx, x, gradient) if ctx.needs_input_grad[1] else None,
            None,
        )


class _PartOfOutputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        x: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        of_gradients: tuple[Callable[[Tensor], Tensor], Any],
    ) -> Tensor:
        low_OI = weight_OI.to(x.dtype)
        ctx.save_for_backward(x, low_OI)
        ctx.add, ctx.deferred = of_gradients
        ctx.shape, ctx.weight = own.shape, weight_OI
        return F.linear(x, low_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, low_OI = ctx.saved_tensors
        gradient_NO = gradient.flatten(0, -2)
        own = None
        if ctx.needs_input_grad[0]:
            own = ctx.add(_in_fp32(gradient_NO, low_OI)).to(x.dtype).view(ctx.shape)
        of_weight = _weight_gradient(ctx, x, gradient) if ctx.needs_input_grad[2] else None
        return own, None, of_weight, gradient_NO.sum(0) if ctx.needs_input_grad[3] else None, None
