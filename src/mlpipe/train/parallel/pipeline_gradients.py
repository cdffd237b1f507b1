"""What is left to do for the gradients of a pipeline's stages when the last backward pass is done: the mean
over the data ranks (a stage's passes overlap in another order than DistributedDataParallel expects), and of a
tied head the sum with the embedding, which is another stage's."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.plan.work import TrainPlan
from mlpipe.train.buckets import buckets
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.pipeline import shares_embedding
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.shards import LocalShard, local_part
from mlpipe.train.world import World

_TIED = "model.embed_tokens.weight"


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Sets what the schedule calls at the end of a step."""
    first, last = world.peer("pp", 0), world.peer("pp", world.mesh.pp - 1)
    tied = None
    if shares_embedding(model) and world.rank in (first, last):
        if world.rank == last:
            model.shards = [replace(one, is_copy=one.name == _TIED) for one in model.shards]
        tied = next(one for one in model.shards if one.name == _TIED)
    averages = world.num_gradient_ranks > 1 and world.mesh.dp_shard == 1  # else FSDP2 has done it
    replicas = RankGroup.along("dp_replicate+cp", world, model.waits) if averages else None

    @torch.no_grad()
    def after_backward() -> None:
        if replicas is not None:
            _average(_gradients(model.shards), replicas)
        if tied is not None and tied.parameter is not None and tied.parameter.requires_grad:
            exchange = model.waits.timed(_add, for_stages=True)
            exchange(local_part(tied.parameter.grad), last if world.rank == first else first)

    model.after_backward = after_backward


def _gradients(shards: list[LocalShard]) -> list[torch.Tensor]:
    parameters = [shard.parameter for shard in shards if shard.parameter is not None]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _average(gradients: list[torch.Tensor], ranks: RankGroup) -> None:
    """In place, by buckets."""
    for bucket in buckets(gradients, GATHER_BUCKET_BYTES, lambda gradient: gradient):
        torch._foreach_div_(bucket, ranks.num_ranks)
        ranks.all_reduce_together(bucket)


def _add(gradient: torch.Tensor, peer: int) -> None:
    """The peer's, which does the same; a sum of two is the same on both to the last bit."""
    other = torch.empty_like(gradient)
    operations = [dist.P2POp(dist.isend, gradient, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient += other
