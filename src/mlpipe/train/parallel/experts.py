"""The axis `ep`: each of its ranks has as many experts of every block, and is sent the tokens that are
theirs.

A rank's rows lie in the order of their experts, so those of each other rank are one piece. How many they are
is told by one small all-to-all, the rows go by another; what the experts make of them comes back the same
way, and so do gradients (Lepikhin et al., GShard, 2020). Along `dp_shard`, within which `ep` groups
neighbours, and `cp`, ranks of the same experts share their rows by FSDP2; if there is one of them only, its
experts stay whole. Under `tp` all this is of the experts that a rank has by that.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mlpipe.plan.work import TrainPlan
from mlpipe.train.models.moe import Compute, Exchange, Experts, Rows
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.precision import low_dtype
from mlpipe.train.slices import Slice, keep_slice
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Before `fully_shard`; parameters may still be on the meta device."""
    rank, num_ranks = world.coordinates["ep"], world.mesh.ep
    ranks = RankGroup(rank, num_ranks, world.experts["ep"].get_group(), model.waits.timed)
    for module in model.built.model.modules():
        if isinstance(module, Experts):
            keep_experts(module, "ep", ranks)
            module.exchange = _within(module.exchange, _Exchange(ranks))


def _within(outer: Exchange | None, inner: Exchange) -> Exchange:
    """Of the experts that `outer` leaves a rank."""
    if outer is None:
        return inner
    return lambda compute, x_SD, ends_E: outer(partial(inner, compute), x_SD, ends_E)


def keep_experts(module: Experts, axis: str, ranks: RankGroup) -> None:
    """Of each parameter the rows of this rank's experts, which are whole."""
    for name in list(module._parameters):
        keep_slice(module, name, Slice(axis, 0, ranks.rank, ranks.num_ranks, ranks.group), {})


class OwnRows:
    """What `Experts` calls where each rank has all tokens, and the sum of what comes out is taken anyway: the
    rows of this rank's experts, which lie side by side; those of others count as 0."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def __call__(self, compute: Compute, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        own = ends_E.shape[0] // self.ranks.num_ranks
        first = self.ranks.rank * own
        begin, end = F.pad(ends_E, (1, 0))[[first, first + own]].tolist()
        low = low_dtype(x_SD)  # of ranks that add exactly the rows are wider
        y_SD = compute(x_SD[begin:end].to(low), ends_E[first : first + own] - begin)
        return F.pad(y_SD, (0, 0, begin, x_SD.shape[0] - end))


class _Exchange:
    """What `Experts` calls."""

    def __init__(self, ranks: RankGroup) -> None:
        self.ranks = ranks

    def __call__(self, compute: Compute, x_SD: Tensor, ends_E: Tensor) -> Tensor:
        num_ranks = self.ranks.num_ranks
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
        theirs_E = torch.empty_like(counts_E)
        self.ranks.timed(dist.all_to_all_single)(theirs_E, counts_E, group=self.ranks.group)
        sent = counts_E.view(num_ranks, -1).sum(1).tolist()
        came_RE = theirs_E.view(num_ranks, -1)  # from each rank, of each expert that is here
        came = came_RE.sum(1).tolist()
        # The experts see the losses of all ranks of `ep`, where each gradient is to be their mean.
        x_SD = _AllToAll.apply(x_SD, sent, came, self.ranks, num_ranks)
        order_S = _by_expert(came_RE)
        places_S = order_S.argsort()
        ends = came_RE.sum(0).cumsum(0).to(torch.int32)
        y_SD = compute(Rows.apply(x_SD, order_S, places_S, 1), ends)
        y_SD = Rows.apply(y_SD, places_S, order_S, 1)
        back: Tensor = _AllToAll.apply(y_SD, came, sent, self.ranks, 1 / num_ranks)
        return back


def _by_expert(came_RE: Tensor) -> Tensor:
    """The order that puts the rows of an expert side by side, which came rank by rank."""
    num_ranks, num_experts = came_RE.shape
    experts = torch.arange(num_experts, device=came_RE.device).repeat(num_ranks)
    order: Tensor = experts.repeat_interleave(came_RE.flatten()).sort(stable=True).indices
    return order


class _AllToAll(torch.autograd.Function):
    """`sent` rows to each rank, `came` from each; gradients, times `factor`, the other way."""

    @staticmethod
    def forward(
        ctx: Any, x_SD: Tensor, sent: list[int], came: list[int], ranks: RankGroup, factor: float
    ) -> Tensor:
        ctx.sent, ctx.came, ctx.ranks, ctx.factor = sent, came, ranks, factor
        return _all_to_all(x_SD, sent, came, ranks)

    @staticmethod
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad = _all_to_all(grad_SD * ctx.factor, ctx.came, ctx.sent, ctx.ranks)
        return grad, None, None, None, None


def _all_to_all(x_SD: Tensor, sent: list[int], came: list[int], ranks: RankGroup) -> Tensor:
    out = x_SD.new_empty((sum(came), *x_SD.shape[1:]))
    ranks.timed(dist.all_to_all_single)(out, x_SD.contiguous(), came, sent, group=ranks.group)
    return out
