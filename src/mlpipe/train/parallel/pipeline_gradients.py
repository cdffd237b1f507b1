"""What is left to do for the gradients of a pipeline's stages when the last backward pass is done: the mean
over the data ranks (a stage's passes overlap in another order than DistributedDataParallel expects), and of a
tied head the sum with the embedding, which is another stage's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mlpipe.plan.plan import TrainPlan
from mlpipe.plan.sizes import GATHER_BUCKET_BYTES
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.pipeline import shares_embedding
from mlpipe.train.shards import LocalShard
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
    averages = world.num_gradient_ranks > 1 and world.mesh.dp_shard == 1

    @torch.no_grad()
    def after_backward() -> None:
        if averages:
            model.waits.timed(_average)(_gradients(model.shards), world)
        if tied is not None and tied.parameter is not None and tied.parameter.requires_grad:
            model.waits.timed(_add)(_local(tied), last if world.rank == first else first)

    model.after_backward = after_backward


def _gradients(shards: list[LocalShard]) -> list[torch.Tensor]:
    parameters = [shard.parameter for shard in shards if shard.parameter is not None]
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _average(gradients: list[torch.Tensor], world: World) -> None:
    """In place, by buckets."""
    group, size = world.group("dp_replicate+cp"), world.num_gradient_ranks
    while gradients:
        bucket: list[torch.Tensor] = []
        num_bytes = 0
        while gradients and (not bucket or num_bytes + gradients[0].nbytes <= GATHER_BUCKET_BYTES):
            num_bytes += gradients[0].nbytes
            bucket.append(gradients.pop(0))
        flat = torch.cat([one.reshape(-1) for one in bucket]).div_(size)
        dist.all_reduce(flat, group=group)
        parts = flat.split([one.numel() for one in bucket])
        torch._foreach_copy_(bucket, [part.view_as(one) for part, one in zip(parts, bucket, strict=True)])


def _local(shard: LocalShard) -> torch.Tensor:
    gradient: Any = shard.parameter.grad if shard.parameter is not None else None
    local: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def _add(gradient: torch.Tensor, peer: int) -> None:
    """The peer's, which does the same; a sum of two is the same on both to the last bit."""
    other = torch.empty_like(gradient)
    operations = [dist.P2POp(dist.isend, gradient, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    gradient += other
