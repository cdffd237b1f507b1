"""Head and next-token cross-entropy in one, `loss: fused`: of the logits there is one chunk of rows at a
time, and of their gradient as well. The gradients of the hidden states and of the head's weights are made in
the forward pass, as the chunk is there then, so that no product is computed twice.

torch 2.15's `linear_cross_entropy` does so, too, but rounds the sum to the dtype of the hidden states: under
bf16 a loss of three digits. Here it is fp32, as are the sums of the weights' gradient over the chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe._core.errors import TrainError
from mlpipe._core.presets import LLAMA
from mlpipe.plan.sizes import HEAD_CHUNK_ELEMENTS
from mlpipe.plan.work import TrainPlan
from mlpipe.train.contract import check_targets
from mlpipe.train.loss import IGNORED, gradient_of_rows, loss_of_rows
from mlpipe.train.models.llama import Llama
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """The model gives its hidden states and its head's weights to the loss."""
    if not isinstance(model.built.model, Llama):
        raise TrainError(
            "only of mlpipe's own models the loss knows the head",
            where=plan.model.build.entry,
            hint="leave loss: fused away, or use a preset",
            kind="input",
        )
    model.built.module.head_loss = head_cross_entropy_sum


def head_cross_entropy_sum(
    hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `cross_entropy_sum` of `hidden @ weight.T`, in the dtype of `hidden`."""
    check_targets(hidden_BTD, targets_BT, LLAMA)
    targets_N = targets_BT.flatten().long()
    if not torch.is_grad_enabled():  # which a function's own context does not know of parameters
        weight_VD = weight_VD.detach()
    total = _HeadCrossEntropy.apply(hidden_BTD.flatten(0, -2), weight_VD, targets_N, scale)
    return total, (targets_N != IGNORED).sum()


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, scale: Tensor | None
    ) -> Tensor:
        of_hidden, of_weight = ctx.needs_input_grad[:2]
        low_VD = weight_VD.to(hidden_ND.dtype)
        kind = "cpu" if hidden_ND.device.type == "cpu" else "cuda"
        rows = max(1, HEAD_CHUNK_ELEMENTS[kind] // len(weight_VD))
        grad_ND = torch.empty_like(hidden_ND) if of_hidden else None
        grad_VD = torch.zeros_like(weight_VD) if of_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        for start in range(0, len(hidden_ND), rows):
            hidden, targets = hidden_ND[start : start + rows], targets_N[start : start + rows]
            loss, log_probs = loss_of_rows(hidden @ low_VD.T, targets)
            total += loss
            if of_hidden or of_weight:
                grad = gradient_of_rows(log_probs, targets, scale).to(hidden.dtype)
                if grad_ND is not None:
                    grad_ND[start : start + rows] = grad @ low_VD
                if grad_VD is not None and grad_VD.dtype == grad.dtype:
                    grad_VD.addmm_(grad.T, hidden)
                elif grad_VD is not None:
                    grad_VD += grad.T @ hidden
                del grad
            del log_probs  # before there are those of the next chunk
        ctx.save_for_backward(grad_ND, grad_VD)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # in place: a second backward is refused by autograd
        grad_ND, grad_VD = (None if grad is None else grad.mul_(grad_output) for grad in ctx.saved_tensors)
        return grad_ND, grad_VD, None, None
