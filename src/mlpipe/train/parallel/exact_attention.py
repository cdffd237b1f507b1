"""Attention of context_attention.py as one rank computes it: nothing is merged that was rounded before, for
ranks that add exactly (`TrainPlan.exact_sums`).

Keys and values of all ranks are gathered, and each chunk's queries see all tokens up to their own at once. In
the backward pass gradients of keys and values go to their owners in fp32, are added and then rounded. Nothing
is computed while they are gathered.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe.train.parallel.attention_blocks import attend_last, attend_last_backward
from mlpipe.train.parallel.rank_group import RankGroup


def forward(q: Tensor, k: Tensor, v: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Output and log-sums of this rank's queries."""
    keys, values = _all(k, v, ranks)
    found = [
        attend_last(queries, keys[:, :, :end], values[:, :, :end])
        for end, queries in zip(_ends(q, ranks), q.chunk(2, dim=2), strict=True)
    ]
    outs, log_sums = zip(*found, strict=True)
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranks: RankGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k, v."""
    keys, values = _all(k, v, ranks)
    gradients = torch.zeros((2, *keys.shape), dtype=log_sums.dtype, device=keys.device)
    dqs = []
    parts = zip(*(x.chunk(2, dim=2) for x in (grad, q, out, log_sums)), strict=True)
    for end, (dout, queries, own, sums) in zip(_ends(q, ranks), parts, strict=True):
        dq, dk, dv = attend_last_backward(dout, queries, keys[:, :, :end], values[:, :, :end], own, sums)
        dqs.append(dq)
        gradients[0, :, :, :end] += dk
        gradients[1, :, :, :end] += dv
    del keys, values, dk, dv
    dk, dv = _to_owners(gradients, ranks)
    return torch.cat(dqs, dim=2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _ends(q: Tensor, ranks: RankGroup) -> tuple[int, int]:
    """Tokens up to the end of this rank's late chunk, and of its early one."""
    length = q.shape[2] // 2
    return (2 * ranks.num_ranks - ranks.rank) * length, (ranks.rank + 1) * length


def _all(k: Tensor, v: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Those of all tokens, in their order (B, K, T, C)."""
    two = torch.stack((k, v))
    by_rank = ranks.all_gather(two).view(ranks.num_ranks, *two.shape)
    late, early = by_rank.chunk(2, dim=4)
    keys, values = torch.cat((*early, *late.flip(0)), dim=3)
    return keys, values


def _to_owners(gradients: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Of gradients of all keys and values those of this rank's tokens: added over the ranks."""
    chunks = gradients.chunk(2 * ranks.num_ranks, dim=3)
    n = ranks.num_ranks
    sent = torch.stack([torch.cat((chunks[2 * n - 1 - rank], chunks[rank]), dim=3) for rank in range(n)])
    received = torch.empty_like(sent)
    ranks.timed(dist.all_to_all_single)(received, sent, group=ranks.group)
    dk, dv = received.sum(0)
    return dk, dv
