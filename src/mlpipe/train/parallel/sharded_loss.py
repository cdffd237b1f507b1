"""Next-token cross-entropy where each rank has the logits of its own part of the vocabulary (Megatron-LM's
vocab-parallel cross-entropy). Of each target the ranks exchange three numbers, in one all-gather: the largest
logit, the sum of exponentials relative to it, and the logit of the target, which one of them has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe.train.loss import IGNORED, chunk_rows
from mlpipe.train.parallel.rank_group import RankGroup


class ShardedLoss:
    """Over the vocabulary's equal parts on `ranks`, in their order."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def cross_entropy_sum(
        self, logits_BTV: Tensor, targets_BT: Tensor, *, fused: bool = False, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `train/loss.py`'s of the whole logits, on every rank. `fused` makes no difference."""
        logits_NV, targets_N = logits_BTV.flatten(0, -2), targets_BT.flatten()
        return _CrossEntropy.apply(logits_NV, targets_N, self.ranks, scale), (targets_N != IGNORED).sum()

    def whole_logits(self, logits_BTV: Tensor) -> Tensor:
        """Of the whole vocabulary, for those who look at them. No gradients."""
        parts = self.ranks.all_gather(logits_BTV.detach()[None])
        return parts.movedim(0, -2).flatten(-2)


class _CrossEntropy(torch.autograd.Function):
    """In chunks of rows, and with one gradient as large as the logits, as that of `train/loss.py`."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, targets_N: Tensor, ranks: RankGroup, scale: Tensor | None
    ) -> Tensor:
        num_rows, vocab_size = logits_NV.shape
        chunks = [
            slice(first, first + step)
            for step in [chunk_rows(logits_NV)]
            for first in range(0, num_rows, step)
        ]
        counts_N = targets_N != IGNORED
        ids_N = targets_N - ranks.rank * vocab_size
        here_N = counts_N & (ids_N >= 0) & (ids_N < vocab_size)
        ids_N1, here_N1 = ids_N.masked_fill(~here_N, 0)[:, None], here_N[:, None]
        own_3N = logits_NV.new_empty((3, num_rows), dtype=torch.float32)
        for rows in chunks:
            logits = logits_NV[rows].float()
            own_3N[0, rows] = logits.amax(dim=-1)
            own_3N[1, rows] = (logits - own_3N[0, rows, None]).exp_().sum(dim=-1)
            own_3N[2, rows] = (logits.gather(1, ids_N1[rows]) * here_N1[rows]).squeeze(1)
        most_RN, sums_RN, picked_RN = ranks.all_gather(own_3N[None]).unbind(1)
        most_N = most_RN.amax(dim=0)
        log_sums_N = most_N + (sums_RN * (most_RN - most_N).exp()).sum(dim=0).log()
        total = (log_sums_N - picked_RN.sum(dim=0)).masked_fill(~counts_N, 0.0).sum()
        weights_N = counts_N if scale is None else counts_N * scale
        grad_NV = torch.empty_like(logits_NV) if ctx.needs_input_grad[0] else None
        for rows in chunks:
            if grad_NV is None:
                break
            grad = (logits_NV[rows].float() - log_sums_N[rows, None]).exp_()
            grad.scatter_add_(1, ids_N1[rows], -here_N1[rows].float())
            grad_NV[rows] = grad.mul_(weights_N[rows, None])
        ctx.save_for_backward(grad_NV)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_NV,) = ctx.saved_tensors
        grad_NV.mul_(grad_output)  # in place: a second backward is refused by autograd
        return grad_NV, None, None, None
