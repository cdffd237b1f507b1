"""The axes `dp_replicate` and `cp` over a slow link: as `replicate`, but the gradients are averaged in fewer
bytes when the backward pass of the last microbatch is done. Sending takes much longer than computing there,
so nothing is gained by beginning earlier; and one thread that does one bucket after the other keeps the same
order on every rank.

What a rank has not told the others is added to its next gradient (error feedback). It belongs to the
training, and a checkpoint has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlpipe.plan.sizes import DDP_BUCKET_BYTES
from mlpipe.plan.work import TrainPlan
from mlpipe.train.buckets import buckets, views
from mlpipe.train.parallel.compression.averager import Averager, Link, MakeAverager, averager_maker, padded
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.rank_rows import RankRows
from mlpipe.train.shards import LocalShard
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Leaves the module as it is: its gradients stay the rank's own until `after_backward`."""
    assert plan.compress is not None
    ranks = RankGroup.along("dp_replicate+cp", world, model.waits)
    coded = plan.compress._asdict()
    gradients = CompressedGradients(model.shards, ranks, averager_maker(plan.compress), coded)
    model.after_backward, model.kept = gradients.average, gradients
    model.step_metrics = gradients.end_step


class CompressedGradients:
    """Of those of `shards` that are trained, bucket by bucket. Buffers that a forward may write are rank 0's,
    as DDP sends them. `kept` of a model. `method`: name and arguments of what `make` makes."""

    def __init__(
        self, shards: Sequence[LocalShard], ranks: RankGroup, make: MakeAverager, method: dict[str, Any]
    ) -> None:
        trained = [shard for shard in shards if shard.is_trained]
        self.link, self.method = Link(ranks), method
        self.loads_states = True  # of averagers: those of another method fit none of this one
        self.rows = RankRows(ranks.rank, ranks.num_ranks)
        self.buckets = [
            _Bucket(some, make, ranks.num_ranks)
            for some in buckets(trained, DDP_BUCKET_BYTES, lambda shard: shard.local)
        ]
        self.buffers = [shard.local for shard in shards if shard.is_buffer]

    @torch.no_grad()
    def average(self) -> None:
        """After the backward pass of the last microbatch."""
        self.link.sent_bytes = 0
        for bucket in self.buckets:
            bucket.average(self.link)
        if self.buffers:
            self.link.ranks.broadcast_together(self.buffers)

    def end_step(self) -> dict[str, Any]:
        """What this rank sent in it, and what an all-reduce in fp32 sends (a ring's)."""
        plain = self.link.all_reduced_bytes(sum(4 * bucket.num_values for bucket in self.buckets))
        return {"exchanged_bytes": self.link.sent_bytes, "exchanged_plain_bytes": plain}

    def state(self) -> list[LocalShard]:
        """By parameter what this rank has not told yet, and what else averagers keep."""
        kept = []
        for bucket in self.buckets:
            for shard, unsent in zip(bucket.shards, bucket.parts, strict=True):
                kept += self.rows.row(
                    LocalShard(f"optim.{shard.name}.unsent", unsent, shard.shape, shard.offset)
                )
            if self.rows.is_loading_nothing or not self.loads_states:
                continue
            for index, tensor in bucket.averager.states().items():
                shape = tuple(tensor.shape)
                kept.append(bucket.shards[index].state_like("subspace", tensor, shape, (0,) * tensor.dim()))
        return kept

    def scalars(self) -> dict[str, Any]:
        """How many ranks have something that they have not told, and what averaged it."""
        return {"num_ranks": self.rows.num_ranks, "method": self.method}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Of the checkpoint that is to be loaded; empty: gradients were not compressed then."""
        self.rows.begin_load(scalars.get("num_ranks", 0))
        self.loads_states = scalars.get("method") == self.method

    def after_load(self) -> None:
        """When `state` was filled."""
        self.rows.after_load()
        self.loads_states = True


class _Bucket:
    """`unsent`: flat, of all `shards`; `parts`: views of it, of their shapes."""

    def __init__(self, shards: list[LocalShard], make: MakeAverager, num_ranks: int) -> None:
        self.shards = shards
        self.tensors = [shard.local for shard in shards]
        self.num_values = sum(tensor.numel() for tensor in self.tensors)
        length = padded(self.num_values, num_ranks)
        self.unsent = torch.zeros(length, dtype=torch.float32, device=shards[0].local.device)
        self.parts = views(self.unsent, self.tensors)
        self.averager: Averager = make(self.tensors)

    def average(self, link: Link) -> None:
        """A parameter that took no part in this rank's passes adds nothing, but what is left of before."""
        parameters = [shard.parameter for shard in self.shards if shard.parameter is not None]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_add_(self.parts, gradients)
        torch._foreach_copy_(gradients, views(self.averager.mean(self.unsent, link), self.tensors))
