"""Each replica keeps the optimizer's states of, and updates, one slice of each parameter along dim 0; the
slices are gathered after the step (Rajbhandari et al., ZeRO, 2020, stage 1).

The slices are torch.chunk's, so the states have the very boxes that FSDP2's have and a checkpoint of
one resumes under the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.work import TrainPlan
from mlpipe.train.buckets import buckets
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.shards import LocalShard, Split, rows_of
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Makes of each parameter that is trained, and that the ranks of `dp_replicate` share, this rank's
    slice."""
    rank, num_ranks = world.coordinates["dp_replicate"], world.mesh.dp_replicate
    split = Split(rank, num_ranks, world.group("dp_replicate"), model.waits.timed)
    whole = [item.local for item in model.shards if item.is_trained]
    model.shards = [_slice(item, world, split) if item.is_trained else item for item in model.shards]
    model.after_step = model.waits.timed(_gatherer(whole, world))


def _slice(item: LocalShard, world: World, split: Split) -> LocalShard:
    if not item.shape:  # a scalar has no dim 0: every rank updates it alike
        return item
    start, stop = rows_of(item.local.shape[0], split.rank, split.num_ranks)
    replica_id, num_replicas = world.replica("dp_replicate", *(cut.axis for cut in item.slices))
    return replace(
        item,
        local=item.local[start:stop],
        offset=(item.first_row + start, *item.offset[1:]),
        replica_id=replica_id,
        num_replicas=num_replicas,
        full_gradient=True,
        split=split,
    )


def _gatherer(tensors: list[torch.Tensor], world: World) -> Callable[[], None]:
    """All-gathers the slices of `tensors` in place, a bucket of parameters at a time: one collective per
    64 MiB instead of one per parameter."""
    split = buckets((one for one in tensors if one.dim()), GATHER_BUCKET_BYTES, lambda tensor: tensor)
    exchanges = [_Exchange(bucket, world) for bucket in split]

    def gather() -> None:
        for exchange in exchanges:
            exchange.run()

    return gather


class _Exchange:
    """One bucket's buffers, made once: slices are packed, gathered and unpacked by fused copies."""

    def __init__(self, bucket: list[torch.Tensor], world: World) -> None:
        self.group = world.group("dp_replicate")
        rank, num_ranks = world.coordinates["dp_replicate"], world.mesh.dp_replicate
        by_rank = [
            [tensor[slice(*rows_of(tensor.shape[0], r, num_ranks))].view(-1) for tensor in bucket]
            for r in range(num_ranks)
        ]
        # rank 0 has the most rows of every tensor
        length = sum(view.numel() for view in by_rank[0])
        self.sent = torch.empty(length, dtype=bucket[0].dtype, device=bucket[0].device)
        self.received = self.sent.new_empty(num_ranks * length)
        self.own = by_rank[rank]
        self.packed = _cut(self.sent, self.own)
        others = [r for r in range(num_ranks) if r != rank]
        self.unpacked = [view for r in others for view in by_rank[r]]
        self.arrived = [part for r in others for part in _cut(self.received[r * length :], by_rank[r])]

    @torch.no_grad()
    def run(self) -> None:
        torch._foreach_copy_(self.packed, self.own)
        dist.all_gather_into_tensor(self.received, self.sent, group=self.group)
        torch._foreach_copy_(self.unpacked, self.arrived)


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [view.numel() for view in like]
    return list(flat[: sum(sizes)].split(sizes))
