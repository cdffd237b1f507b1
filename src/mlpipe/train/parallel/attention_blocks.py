"""Attention of some queries to some keys, of which the blocks of a sequence are put together: each with the
log-sums of exponentials of its scores, by which flash attention merges blocks (Dao, FlashAttention-2, 2023).
With the output and the log-sums of whole rows its backward pass takes blocks as well, and what it gives of
them adds up to the whole gradients.

Shapes as of context_attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

_aten = torch.ops.aten


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Output and, for each query, the logarithm of the sum of exponentials of its scores, in fp32 or more."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)  # type: ignore[no-any-return]
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]  # type: ignore[no-any-return]


def merge(out: Tensor, log_sums: Tensor, more: Tensor, more_sums: Tensor) -> None:
    """In place: of the same queries, what they see of other keys. `out`: as wide as the log-sums."""
    out.lerp_(more.to(out.dtype), (more_sums - log_sums).sigmoid()[..., None])
    log_sums.copy_(torch.logaddexp(log_sums, more_sums))


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad, q, k, v, out, log_sum, 0.0, causal
        )
    log_sum = log_sum.contiguous()  # its kernel does not look at strides
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # state of a dropout that is 0
    return _aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
        grad, q, k, v, out, log_sum, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused
    )


def attend_last(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `attend`, of queries of the last tokens that there are keys of, each to those up to its own."""
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, False, attn_mask=_unseen(q, k)
        )
    return attend(q, k, v, causal=True)  # of fewer queries than keys it takes the last ones


def attend_last_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, on a CPU in fp32: a GPU's kernel gives them rounded."""
    if q.device.type == "cpu":
        wide = [x.to(log_sum.dtype) for x in (grad, q, k, v, out)]
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            *wide, log_sum, 0.0, False, attn_mask=_unseen(wide[1], k)
        )
    return attend_backward(grad, q, k, v, out, log_sum, causal=True)


def _unseen(q: Tensor, k: Tensor) -> Tensor:
    """What to add to scores of such queries."""
    mask = q.new_full((q.shape[2], k.shape[2]), float("-inf"))
    return mask.triu_(k.shape[2] - q.shape[2] + 1)
