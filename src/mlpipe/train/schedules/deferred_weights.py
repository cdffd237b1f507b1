"""Backward passes in two parts, as zero-bubble schedules need them: what a stage's neighbour waits for at
once, and the gradients of the linear layers' weights later (Qi et al., Zero Bubble Pipeline Parallelism,
2023). Embedding and norms, whose gradients cost little, are not put off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mlpipe.train.precision import low_dtype

_Product = tuple[nn.Parameter, Tensor, Tensor]  # weight, input, gradient of the output


class DeferredWeights:
    """Of the plain linear layers (without a bias) in `module`, whose forward it changes in place; where
    another technique has changed it, what that calls takes the layer's `_deferred` into account, as
    `parallel/exact_products.py` does."""

    def __init__(self, module: nn.Module) -> None:
        self._put_off: dict[tuple[int, int], list[_Product]] = {}
        self._current: list[_Product] | None = None
        for part in module.modules():
            if type(part) is nn.Linear and part.bias is None:
                part.__dict__["_deferred"] = self
                if "forward" not in part.__dict__:
                    part.forward = MethodType(_forward, part)  # type: ignore[method-assign]

    @contextmanager
    def collecting(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a backward pass."""
        self._current = self._put_off[stage, microbatch] = []
        try:
            yield
        finally:
            self._current = None

    @torch.no_grad()
    def compute(self, stage: int, microbatch: int) -> None:
        """What was put off, added to the gradients of the weights."""
        for weight, inputs, gradient in self._put_off.pop((stage, microbatch), ()):
            add_gradient(weight, _product(inputs, gradient).to(weight.dtype))

    def takes(self, weight: nn.Parameter, inputs: Tensor, gradient: Tensor) -> bool:
        """Whether the gradient of `weight` is put off."""
        if self._current is not None:
            self._current.append((weight, inputs, gradient))
        return self._current is not None


def add_gradient(weight: nn.Parameter, gradient: Tensor) -> None:
    """As autograd does."""
    if weight.grad is None:
        weight.grad = gradient
    else:
        weight.grad += gradient


def _product(inputs: Tensor, gradient: Tensor) -> Tensor:
    return gradient.flatten(0, -2).T @ inputs.flatten(0, -2)


def _forward(self: nn.Module, inputs: Tensor) -> Tensor:
    weight: Any = self.weight
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return F.linear(inputs, weight)
    kind = inputs.device.type
    low = inputs.to(low_dtype(inputs))
    with torch.autocast(kind, enabled=False):
        output: Tensor = _Linear.apply(low, weight, self.__dict__["_deferred"])
    return output


class _Linear(torch.autograd.Function):
    """Computes in the dtype of its inputs, as autocast would."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: nn.Parameter, deferred: DeferredWeights) -> Tensor:
        low = weight.to(inputs.dtype)
        ctx.save_for_backward(inputs, low)
        ctx.weight, ctx.deferred = weight, deferred
        return F.linear(inputs, low)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        inputs, low = ctx.saved_tensors
        own = gradient @ low if ctx.needs_input_grad[0] else None
        if ctx.deferred.takes(ctx.weight, inputs, gradient):
            return own, None, None
        return own, _product(inputs, gradient).to(ctx.weight.dtype), None
