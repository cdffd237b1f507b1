"""Attention of context_attention.py with the keys and values of one rank at a time (Liu et al., Ring
Attention, 2023).

A rank begins with its own. In each of n - 1 rounds it computes with those of another, while it passes them on
to the next rank: of a lower rank all queries see the early chunk only, of a higher one the late queries alone
see both, so that each round is as much work as the first, on every rank. Outputs are merged as they come, in
fp32. In the backward pass keys and values go round again, and what a round gives of their gradients goes
straight to their owner, beside the next round, and is added there in fp32: handed round with them the sums
would have to travel in fp32.

Of others' keys and values a rank has those that it computes with and those that arrive; of their gradients
those that it computes, that it sends and that arrive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mlpipe.train.parallel.attention_blocks import attend, attend_backward, merge
from mlpipe.train.parallel.rank_group import RankGroup


def forward(q: Tensor, k: Tensor, v: Tensor, ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """Output and log-sums of this rank's queries."""
    here, half = torch.stack((k, v)), q.shape[2] // 2
    arriving = _passed_on(here, 0, ranks)
    out, log_sums = map(_swapped, attend(*map(_swapped, (q, k, v)), causal=True))
    out = out.to(log_sums.dtype)
    for away in range(1, ranks.num_ranks):
        here = arriving()
        arriving = _passed_on(here, away, ranks)
        queries, keys = _seen(away, half, ranks.rank)
        more, more_sums = attend(q[:, :, queries], *here[:, :, :, keys], causal=False)
        merge(out[:, :, queries], log_sums[:, :, queries], more, more_sums)
    return out.to(q.dtype), log_sums


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sums: Tensor, ranks: RankGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k, v."""
    here, half, wide = torch.stack((k, v)), q.shape[2] // 2, log_sums.dtype
    arriving = _passed_on(here, 0, ranks)
    dq, dk, dv = map(_swapped, attend_backward(*map(_swapped, (grad, q, k, v, out, log_sums)), causal=True))
    dq, own = dq.to(wide), torch.stack((dk, dv)).to(wide)
    del dk, dv
    owed: list[Callable[[], None]] = []  # of the round before, which goes with what it holds
    for away in range(1, ranks.num_ranks):
        here = arriving()
        arriving = _passed_on(here, away, ranks)
        queries, keys = _seen(away, half, ranks.rank)
        dout, some, part, sums = (x[:, :, queries] for x in (grad, q, out, log_sums))
        k, v = here[:, :, :, keys]
        more, *of_keys = attend_backward(dout, some, k, v, part, sums, causal=False)
        dq[:, :, queries] += more
        while owed:
            owed.pop()()
        owed.append(_to_owner(torch.stack(of_keys), own, away, ranks))
        del k, v, more, of_keys
    while owed:
        owed.pop()()
    dk, dv = own.to(q.dtype)
    return dq.to(q.dtype), dk, dv


def _seen(away: int, half: int, rank: int) -> tuple[slice, slice]:
    """Which queries of `rank` see which keys of the one so many before it around the ring."""
    if away <= rank:
        return slice(None), slice(half, None)
    return slice(half), slice(None)


def _swapped(x: Tensor) -> Tensor:
    """The early chunk before the late one, as the diagonal wants them, or back again."""
    return x.roll(x.shape[2] // 2, 2)


def _passed_on(here: Tensor, away: int, ranks: RankGroup) -> Callable[[], Tensor]:
    """What the next round computes with, once it is there; after the last one there is none."""
    if away == ranks.num_ranks - 1:
        return lambda: here
    received = torch.empty_like(here)
    wait = ranks.exchange(here, 1, received, -1)

    def arrived() -> Tensor:
        wait()
        return received

    return arrived


def _to_owner(gradients: Tensor, own: Tensor, away: int, ranks: RankGroup) -> Callable[[], None]:
    """Sends what a round gave, and adds to `own` what the rank gives that has seen these keys meanwhile."""
    half, there = own.shape[3] // 2, (ranks.rank + away) % ranks.num_ranks
    seen = own[:, :, :, _seen(away, half, there)[1]]
    received = gradients.new_empty(seen.shape)
    wait = ranks.exchange(gradients, -away, received, away)

    def added() -> None:
        wait()
        seen.add_(received)

    return added
