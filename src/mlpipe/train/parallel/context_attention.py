"""Causal attention of sequences that lie on several ranks, two chunks of each on every one, as an operator.

Of 2 n equal chunks rank r of n has number 2 n - 1 - r and number r, in this order: a late one, which sees
much of the sequence, and an early one, so that all ranks compute equally much (Llama 3, 2024, section
3.3.2). A chunk's queries see the keys of their own chunk, causally, and all keys of the earlier ones; nothing
above the diagonal is computed. How keys and values of the others get here: all at once
(gathered_attention.py), or one rank's at a time (ring_attention.py).

B batch · H query heads · K key/value heads · L tokens here (two chunks) · C channels of a head
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mlpipe.plan.settings import ContextExchange
from mlpipe.train.parallel import exact_attention, gathered_attention, ring_attention
from mlpipe.train.parallel.rank_group import RankGroup

# By a number, which is what an operator can take.
RANKS: dict[int, tuple[RankGroup, ContextExchange]] = {}
_WAYS: dict[ContextExchange, Any] = {"all_gather": gathered_attention, "ring": ring_attention}


def _way(ranks: RankGroup, exchange: ContextExchange) -> Any:
    return exact_attention if ranks.exact and exchange == "all_gather" else _WAYS[exchange]


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
    ranks, exchange = RANKS[number]
    return _way(ranks, exchange).forward(q, k, v, ranks)  # type: ignore[no-any-return]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, number: int
) -> tuple[Tensor, Tensor, Tensor]:
    ranks, exchange = RANKS[number]
    return _way(ranks, exchange).backward(grad, q, k, v, out, log_sums, ranks)  # type: ignore[no-any-return]


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
