"""Causal attention of sequences that lie on several ranks, two chunks of each on every one: the arithmetic,
and what travels.

Of 2 n equal chunks rank r of n has number 2 n - 1 - r and number r, in this order: a late one, which sees
much of the sequence, and an early one, so that all ranks compute equally much (Llama 3, 2024, section
3.3.2). A chunk's queries see the keys of their own chunk, causally, and all keys of the earlier ones. The
two parts are computed apart and merged by their log-sums of exponentials, as flash attention merges blocks
(Dao, FlashAttention-2, 2023); nothing above the diagonal is computed.

Keys and values of all ranks are gathered, a layer at a time, beside the computing of the diagonal blocks.
They are given up after the forward pass and gathered again for the backward pass, whose gradients of them go
to their owners and are added there in fp32. Key/value heads travel as they are, not repeated for their
group. All that grows with the whole sequence is what one layer has of them in its backward pass: 6 K C
numbers a token, keys, values, their gradients and copies of these on their way. A ring (Liu et al., Ring
Attention, 2023) would hold two ranks' parts instead, and send as much.

B batch · H query heads · K key/value heads · L tokens here (two chunks) · C channels of a head
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe.train.parallel.rank_group import RankGroup

_aten = torch.ops.aten


# By a number, which is what an operator can take.
RANKS: dict[int, RankGroup] = {}


def context_attention(q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, number: int) -> Tensor:
    """Attention of this rank's queries, (B, H, L, C), to all tokens before them."""
    result: Tensor = _ContextAttention.apply(q_BHLC, k_BKLC, v_BKLC, number)
    return result


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
        out, log_sums = torch.ops.mlpipe.context_attention(q, k, v, number)
        ctx.save_for_backward(q, k, v, out, log_sums)
        ctx.number = number
        return out  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        dq, dk, dv = torch.ops.mlpipe.context_attention_backward(grad, *ctx.saved_tensors, ctx.number)
        return dq, dk, dv, None


def _forward(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    ranks = RANKS[number]
    arriving = _Gathering(k, v, ranks)
    own = [_attend(*parts, causal=True) for parts in zip(*map(_halves, (q, k, v)), strict=True)]
    keys, values = arriving.wait()
    outs, sums = [], []
    for late, queries, (out, log_sum) in zip((True, False), _halves(q), own, strict=True):
        before = _earlier(keys, late, ranks)
        if before.shape[-2]:
            more, more_sum = _attend(queries, before, _earlier(values, late, ranks), causal=False)
            total = torch.logaddexp(log_sum, more_sum)
            out = _weighted(out, log_sum, total) + _weighted(more, more_sum, total)
            log_sum = total
        outs.append(out.to(q.dtype))
        sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(sums, dim=2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each part by itself: with the output and the log-sum of whole rows, as flash attention's backward
    pass takes its blocks, the parts' gradients add up to the whole ones."""
    ranks = RANKS[number]
    arriving = _Gathering(k, v, ranks)
    rows = list(zip(*map(_halves, (grad, q, out, log_sums)), strict=True))
    own = [
        _attend_backward(dout, queries, keys, values, part, log_sum, causal=True)
        for (dout, queries, part, log_sum), keys, values in zip(rows, _halves(k), _halves(v), strict=True)
    ]
    keys, values = arriving.wait()
    d_keys_values = keys.new_zeros((2, *keys.shape))
    dqs = []
    for late, (dout, queries, part, log_sum), (dq, _, _) in zip((True, False), rows, own, strict=True):
        before = _earlier(keys, late, ranks)
        if before.shape[-2]:
            more, dk, dv = _attend_backward(
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


def _weighted(out: Tensor, log_sum: Tensor, total: Tensor) -> Tensor:
    return out * (log_sum - total).exp()[..., None]


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and, for each query, the logarithm of the sum of exponentials of its scores, in fp32 or more."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)  # type: ignore[no-any-return]
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]  # type: ignore[no-any-return]


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, log_sum, 0.0, causal
        )
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # state of a dropout that is 0
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, log_sum, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
    )


def _shapes(q: Tensor, k: Tensor, v: Tensor, number: int) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=wide)


def _backward_shapes(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


# Operators of their own: selective activation checkpointing keeps the result and gathers nothing twice, and
# torch.compile takes each as one node of its graph.
_library = torch.library.Library("mlpipe", "FRAGMENT")
_library.define("context_attention(Tensor q, Tensor k, Tensor v, int number) -> (Tensor, Tensor)")
_library.define(
    "context_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor log_sums, "
    "int number) -> (Tensor, Tensor, Tensor)"
)
for _device in ("CPU", "CUDA"):
    _library.impl("context_attention", _forward, _device)
    _library.impl("context_attention_backward", _backward, _device)
_library.impl("context_attention", _shapes, "Meta")
_library.impl("context_attention_backward", _backward_shapes, "Meta")
