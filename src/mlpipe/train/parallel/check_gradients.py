"""Whether patterns of one's own split a model as they say: after the first backward, the parameters that
every rank of `tp` has whole must have the same gradients there, which no shape shows. Of gradients that
overflowed, as in fp16, nobody can tell: then after the next one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mlpipe._core.errors import TrainError
from mlpipe.plan.work import TrainPlan
from mlpipe.train.init import some_of
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.world import World

_TOLERANCE, _ROUNDING = 1e-2, 1e-6  # of a norm, in bf16; of all, where a gradient is nothing but rounding


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """After whatever else changes `gradient_sync`, which it does for the first step only."""
    inner = model.gradient_sync

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        with inner(last):
            yield
        if last and _check(model, RankGroup.along("tp", world, model.waits), plan.model.build.entry):
            model.gradient_sync = inner

    model.gradient_sync = gradient_sync


@torch.no_grad()
def _check(model: ParallelizedModel, ranks: RankGroup, entry: str) -> bool:
    """Whether they could be compared. Raises TrainError (input) on all these ranks alike."""
    whole = [
        (shard.name.removeprefix("model."), gradient)
        for shard in model.shards
        if not shard.slices and (gradient := shard.gradient()) is not None
    ]
    if not whole:
        return True
    norms = ranks.all_gather(torch.stack([gradient.float().norm() for _, gradient in whole])[None])
    if not norms.isfinite().all():
        return False
    difference = (norms - norms[0]).abs().amax(0)
    differ = (difference > _TOLERANCE * norms.amax(0) + _ROUNDING * norms.norm()).tolist()
    if names := [name for (name, _), one in zip(whole, differ, strict=True) if one]:
        raise TrainError(
            f"the ranks of tp have different gradients of {some_of(names)}, which are not split",
            where=entry,
            hint="in model.tensor give what stands between a column and its row, and is whole, the word sum",
            kind="input",
        )
    return True
