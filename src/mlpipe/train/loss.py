"""Next-token cross-entropy, as a sum: the loop divides by the target tokens of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe.plan.sizes import LOSS_CHUNK_ELEMENTS

IGNORED = -100
_CHUNK_ELEMENTS_CPU, _CHUNK_ELEMENTS = LOSS_CHUNK_ELEMENTS["cpu"], LOSS_CHUNK_ELEMENTS["cuda"]


def cross_entropy_sum(
    logits_BTV: Tensor, targets_BT: Tensor, *, fused: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The summed loss in nats (fp32 scalar) and the number of targets that count (int64 scalar). Targets
    of -100 are ignored. Computed in fp32 whatever the logits' dtype. `fused`: compiled, for a GPU, where the
    chunks are bound by memory's speed: 28 bytes an element, against about 8. `scale`: of the gradient, by
    which it is multiplied before it is rounded to the logits' dtype."""
    logits_NV, targets_N = logits_BTV.flatten(0, -2), targets_BT.flatten()
    if torch.compiler.is_compiling():  # a whole model: the compiler fuses plain torch with what surrounds it
        total = F.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction="sum")
        total = scale_gradient(total, scale)
    else:
        total = _CrossEntropy.apply(logits_NV, targets_N, fused, scale)
    return total, (targets_BT != IGNORED).sum()


def scale_gradient(loss: Tensor, scale: Tensor | None) -> Tensor:
    """The loss as it is, and its gradient times `scale`; None: as it is, too."""
    scaled: Tensor = loss if scale is None else _ScaledGradient.apply(loss, scale)
    return scaled


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return loss.view_as(loss)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.saved_tensors[0], None


def fused_loss(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """And each row's logarithm of the sum of exponentials. In plain torch, to be compiled."""
    log_sums_N = logits_NV.float().logsumexp(dim=-1)
    counts_N = targets_N != IGNORED
    picked_N1 = torch.where(counts_N, targets_N, 0)[:, None]
    losses_N = log_sums_N - logits_NV.gather(1, picked_N1).squeeze(1).float()
    return torch.where(counts_N, losses_N, 0.0).sum(), log_sums_N


def fused_gradient(logits_NV: Tensor, targets_N: Tensor, log_sums_N: Tensor, factor: Tensor) -> Tensor:
    """Of `factor` times the loss, in the logits' dtype; to be compiled into one kernel."""
    probs_NV = (logits_NV.float() - log_sums_N[:, None]).exp()
    hit_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device) == targets_N[:, None]
    grad_NV = (probs_NV - hit_NV.float()) * factor
    return torch.where((targets_N != IGNORED)[:, None], grad_NV, 0.0).to(logits_NV.dtype)


@cache
def _compiled() -> tuple[Callable[..., tuple[Tensor, Tensor]], Callable[..., Tensor]]:
    """A second number of rows makes one for any number of it: those of packed samples differ in each
    microbatch, and after eight numbers dynamo would compile no more."""
    return torch.compile(fused_loss), torch.compile(fused_gradient)


def loss_of_rows(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Of a chunk, and its fp32 logarithms of probabilities; without gradients."""
    exact = logits_NV.float()
    # a copy is overwritten: of bf16, `dtype=torch.float32` makes one and keeps it beside what comes out
    log_probs = torch.log_softmax(exact, dim=-1, out=None if exact is logits_NV else exact)
    return F.nll_loss(log_probs, targets_N, ignore_index=IGNORED, reduction="sum"), log_probs


def gradient_of_rows(log_probs: Tensor, targets: Tensor, scale: Tensor | None) -> Tensor:
    """Of their loss, in fp32, in the place of `log_probs`."""
    counts = targets != IGNORED
    picked = torch.where(counts, targets, 0)[:, None]
    grad = log_probs.exp_().scatter_add_(1, picked, torch.full_like(log_probs[:, :1], -1.0))
    weights = counts[:, None] if scale is None else counts[:, None] * scale
    return torch.mul(grad, weights, out=grad)


def chunk_rows(logits_NV: Tensor) -> int:
    """So many at a time."""
    elements = _CHUNK_ELEMENTS_CPU if logits_NV.device.type == "cpu" else _CHUNK_ELEMENTS
    return max(1, elements // logits_NV.shape[1])


class _CrossEntropy(torch.autograd.Function):
    """Loss and gradient in one pass over chunks of rows. The peak is the logits and their gradient, both in
    the logits' dtype (4 bytes an element under bf16), where eager autograd keeps three fp32 copies besides.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, fused: bool, scale: Tensor | None) -> Tensor:
        ctx.fused = fused and ctx.needs_input_grad[0]
        if ctx.fused:
            total, log_sums_N = _compiled()[0](logits_NV, targets_N)
            ctx.save_for_backward(logits_NV, targets_N, log_sums_N, scale)
            return total
        rows = chunk_rows(logits_NV)
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.float32, device=logits_NV.device)
        for start in range(0, len(logits_NV), rows):
            targets = targets_N[start : start + rows]
            loss, log_probs = loss_of_rows(logits_NV[start : start + rows], targets)
            total += loss
            if grad_NV is not None:
                grad_NV[start : start + rows] = gradient_of_rows(log_probs, targets, scale)
            del log_probs  # before there are those of the next chunk
        ctx.save_for_backward(grad_NV)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.fused:
            *saved, scale = ctx.saved_tensors
            factor = grad_output if scale is None else grad_output * scale
            return _compiled()[1](*saved, factor), None, None, None
        (grad_NV,) = ctx.saved_tensors
        grad_NV.mul_(grad_output)  # in place: a second backward is refused by autograd
        return grad_NV, None, None, None
