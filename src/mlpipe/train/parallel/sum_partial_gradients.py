"""Sums the gradients that are of a rank's own tokens only (`partial`) over the ranks that have the other
tokens: those of all such parameters in one all-reduce a step, when all else of the gradients is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """After whatever else changes `gradient_sync`."""
    wanted = {id(module._parameters[name]) for module, name in model.partial}
    shards = [shard for shard in model.shards if id(shard.parameter) in wanted]
    if not shards:
        return
    ranks = RankGroup.along("tp", world, model.waits)
    inner = model.gradient_sync

    @torch.no_grad()
    def sum_over_ranks() -> None:
        gradients = [own for shard in shards if (own := shard.gradient()) is not None]
        if gradients:
            ranks.all_reduce_together(gradients)

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        with inner(last):
            yield
        if last:
            sum_over_ranks()

    model.gradient_sync = gradient_sync
