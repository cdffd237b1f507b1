"""Collectives of the ranks along one axis of the mesh, as operations that gradients go back through.

Rows are dim 0. What one direction gathers the other reduces and scatters (Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models, 2022, section 4.2.2); what one passes on the other sums
(Shoeybi et al., Megatron-LM, 2019, section 3: f and g).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlpipe.train.buckets import views
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.world import World

_BUCKET_BYTES = 250 * 2**20


def send_together(tensors: list[Tensor]) -> None:
    """Rank 0's to all, in place, by the call and the bucket's bytes of DistributedDataParallel."""
    group = dist.distributed_c10d._get_default_group()
    dist._broadcast_coalesced(group, tensors, _BUCKET_BYTES, 0)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class RankGroup:
    """This is `rank` of `num_ranks`, of the process group `group` (None: the default one). `timed` wraps a
    collective, so that it counts as waiting. `exact`: parts of a sum over these ranks are in fp32, and the
    sum alone is rounded (`TrainPlan.exact_sums`)."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    timed: Callable[[Callable[..., Any]], Callable[..., Any]]
    exact: bool = field(default=False, kw_only=True)

    @staticmethod
    def along(axis: str, world: World, waits: Waits, *, exact: bool = False) -> RankGroup:
        """Of the ranks that differ from this one along `axis`, or joined axes, only."""
        return RankGroup(*world.place(axis), world.group(axis), waits.timed, exact=exact)

    def addend(self, part: Tensor) -> Tensor:
        """As it is to be added up."""
        return part.float() if self.exact else part

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks, one behind the other. No gradients."""
        whole = part.new_empty((self.num_ranks * part.shape[0], *part.shape[1:]))
        self.timed(dist.all_gather_into_tensor)(whole, part.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum over all ranks. No gradients."""
        part = whole.new_empty((whole.shape[0] // self.num_ranks, *whole.shape[1:]))
        self.timed(dist.reduce_scatter_tensor)(part, whole.contiguous(), group=self.group)
        return part

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row r goes to rank r; back comes a row from each. No gradients."""
        received = torch.empty_like(rows)
        self.timed(dist.all_to_all_single)(received, rows.contiguous(), group=self.group)
        return received

    def exchange(self, sent: Tensor, to: int, received: Tensor, source: int) -> Callable[[], None]:
        """Sends one tensor to the rank so many after this one, around the ring, and receives another from
        one, beside what is done until the result is called. No gradients."""
        others = [(self.rank + offset) % self.num_ranks for offset in (to, source)]
        if self.group is not None:
            others = [dist.get_global_rank(self.group, other) for other in others]
        operations = [
            dist.P2POp(function, tensor, other, self.group)
            for function, tensor, other in (
                (dist.isend, sent, others[0]),
                (dist.irecv, received, others[1]),
            )
        ]
        works = dist.batch_isend_irecv(operations)
        operations.clear()

        def wait() -> None:
            while works:  # each holds its tensor
                self.timed(works.pop().wait)()

        return wait

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, in place. No gradients."""
        self.timed(dist.all_reduce)(tensor, group=self.group)
        return tensor

    def all_reduce_together(self, tensors: list[Tensor]) -> None:
        """The sum of each over all ranks, in place, by one collective. No gradients."""
        flat = self.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        torch._foreach_copy_(tensors, views(flat, tensors))

    def broadcast_together(self, tensors: list[Tensor]) -> None:
        """What the first of these ranks has, in place: those of one dtype by one collective."""
        first = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            some = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in some])
            self.timed(dist.broadcast)(flat, first, group=self.group)
            for tensor, part in zip(some, views(flat, some), strict=True):
                tensor.copy_(part)


class HostGroup(RankGroup):
    """For a thread that sends beside another one's collectives. On a GPU copies on the host travel, by gloo:
    collectives of two of NCCL's communicators are to begin in one order on all ranks, or each may wait for a
    kernel that stands behind another's, and two threads have no order."""

    def all_gather(self, part: Tensor) -> Tensor:
        """As of any group."""
        return super().all_gather(part.cpu()).to(part.device)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """As of any group."""
        return super().all_to_all(rows.cpu()).to(rows.device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """As of any group."""
        return tensor.copy_(super().all_reduce(tensor.cpu()))


def gathered_rows(part: Tensor, ranks: RankGroup) -> Tensor:
    """All rows, for who gives each rank another part of the gradient: those are summed. Of ranks that add
    exactly in fp32, so that these parts are not rounded before."""
    whole: Tensor = _GatherRows.apply(part, ranks)
    return whole


def scattered_sum(partial: Tensor, ranks: RankGroup, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's rows of the sum, rounded to `dtype`."""
    part: Tensor = _ScatterSum.apply(partial, ranks, dtype)
    return part


def copied(x: Tensor, ranks: RankGroup) -> Tensor:
    """The same on every rank, for who gives each rank another part of the gradient: those are summed."""
    same: Tensor = _Copy.apply(x, ranks)
    return same


def summed(partial: Tensor, ranks: RankGroup) -> Tensor:
    """The sum, on every rank, which all go on with in the same way."""
    whole: Tensor = _Sum.apply(partial, ranks)
    return whole


def embedded_here(embedding: nn.Embedding, ids: Tensor, ranks: RankGroup) -> Tensor:
    """Rows of a table of which each rank has a part: zeros where another rank has the row."""
    num_rows = embedding.weight.shape[0]
    own = ids - ranks.rank * num_rows
    elsewhere = (own < 0) | (own >= num_rows)
    return F.embedding(own.masked_fill(elsewhere, 0), embedding.weight).masked_fill(elsewhere[..., None], 0.0)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks, ctx.dtype = ranks, part.dtype
        return ranks.addend(ranks.all_gather(part))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.reduce_scatter(gradient).to(ctx.dtype), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: RankGroup, dtype: torch.dtype | None) -> Tensor:
        ctx.ranks, ctx.dtype = ranks, partial.dtype
        return ranks.reduce_scatter(ranks.addend(partial)).to(dtype or partial.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.all_gather(gradient).to(ctx.dtype), None, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.all_reduce(gradient.clone(memory_format=torch.contiguous_format)), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, ranks: RankGroup) -> Tensor:
        return ranks.all_reduce(partial.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
