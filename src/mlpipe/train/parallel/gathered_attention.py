"""Attention of context_attention.py with the keys and values of all ranks at once.

They are gathered, a layer at a time, beside the computing of the diagonal blocks; what is on the diagonal and
what is before it are computed apart and merged. They are given up after the forward pass and gathered again
for the backward pass, whose gradients of them go to their owners and are added there in fp32. Key/value heads
travel as they are, not repeated for their group. All that grows with the whole sequence is what one layer has
of them in its backward pass: 6 K C numbers a token, keys, values, their gradients and copies of these on
their way. ring_attention.py holds a few ranks' parts instead, and sends as much.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe.train.parallel.attention_blocks import attend, attend_backward, merge
from mlpipe.train.parallel.rank_group import RankGroup


def forward(q: Tensor, k: Tensor, v: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Output and log-sums of this rank's queries."""
    arriving = _Gathering(k, v, ranks)
    own = [attend(*parts, causal=True) for parts in zip(*map(_halves, (q, k, v)), strict=True)]
    keys, values = arriving.wait()
    outs, sums = [], []
    for late, queries, (out, log_sum) in zip((True, False), _halves(q), own, strict=True):
        before = _earlier(keys, late, ranks)
        if before.shape[-2]:
            more, more_sum = attend(queries, before, _earlier(values, late, ranks), causal=False)
            out = out.to(log_sum.dtype)
            merge(out, log_sum, more, more_sum)
        outs.append(out.to(q.dtype))
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranks: RankGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k, v, of each part by itself."""
    arriving = _Gathering(k, v, ranks)
    rows = list(zip(*map(_halves, (grad, q, out, log_sums)), strict=True))
    own = [
        attend_backward(dout, queries, keys, values, part, log_sum, causal=True)
        for (dout, queries, part, log_sum), keys, values in zip(rows, _halves(k), _halves(v), strict=True)
    ]
    keys, values = arriving.wait()
    d_keys_values = keys.new_zeros((2, *keys.shape))
    dqs = []
    for late, (dout, queries, part, log_sum), (dq, _, _) in zip((True, False), rows, own, strict=True):
        before = _earlier(keys, late, ranks)
        if before.shape[-2]:
            more, dk, dv = attend_backward(
                dout, queries, before, _earlier(values, late, ranks), part, log_sum, causal=False
            )
            dq = dq + more
            _earlier(d_keys_values[0], late, ranks).add_(dk)
            _earlier(d_keys_values[1], late, ranks).add_(dv)
        dqs.append(dq)
    del keys, values, before
    dk, dv = _to_owners(d_keys_values, ranks)
    dk += torch.cat([part[1] for part in own], dim=2)
    dv += torch.cat([part[2] for part in own], dim=2)
    return torch.cat(dqs, dim=2), dk.to(k.dtype), dv.to(v.dtype)


class _Gathering:
    """Keys and values of all ranks, on their way."""

    def __init__(self, k: Tensor, v: Tensor, ranks: RankGroup) -> None:
        sent = torch.stack((k, v))
        self.ranks, self.shape = ranks, sent.shape
        self.received = sent.new_empty((ranks.num_ranks, *sent.shape))
        self.work = dist.all_gather_into_tensor(
            self.received.view(-1, *sent.shape[1:]), sent, group=ranks.group, async_op=True
        )

    def wait(self) -> tuple[Tensor, Tensor]:
        """(B, K, 2 n chunks, C) each: the late chunks of ranks 0, 1, .., then their early ones, so that those
        before a chunk lie side by side."""
        assert self.work is not None
        self.ranks.timed(self.work.wait)()
        two, batch, heads, length, channels = self.shape
        by_rank = self.received.view(self.ranks.num_ranks, two, batch, heads, 2, length // 2, channels)
        whole = by_rank.permute(1, 2, 3, 4, 0, 5, 6).reshape(two, batch, heads, -1, channels)
        del self.received, self.work
        return whole[0], whole[1]


def _to_owners(whole: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Of gradients of all keys and values, (2, B, K, 2 n chunks, C), those of this rank's tokens: added over
    the ranks, at least in fp32."""
    two, batch, heads, length, channels = whole.shape
    n = ranks.num_ranks
    by_rank = whole.view(two, batch, heads, 2, n, length // (2 * n), channels)
    sent = by_rank.permute(4, 0, 1, 2, 3, 5, 6).contiguous()
    received = torch.empty_like(sent)
    ranks.timed(dist.all_to_all_single)(received, sent, group=ranks.group)
    added = received.sum(0, dtype=torch.promote_types(sent.dtype, torch.float32))
    dk, dv = added.view(two, batch, heads, length // n, channels)
    return dk, dv


def _earlier(keys: Tensor, late: bool, ranks: RankGroup) -> Tensor:
    """Of all keys, in the order of `_Gathering.wait`, those before this rank's late or early chunk."""
    length = keys.shape[2] // (2 * ranks.num_ranks)
    if late:  # all early chunks, and the late ones of higher ranks
        return keys[:, :, (ranks.rank + 1) * length :]
    start = ranks.num_ranks * length
    return keys[:, :, start : start + ranks.rank * length]


def _halves(x: Tensor) -> tuple[Tensor, ...]:
    """Along the tokens: the late chunk and the early one."""
    return x.chunk(2, dim=2)
