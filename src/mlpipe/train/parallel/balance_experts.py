"""Experts that had more tokens than the mean become a little less likely, the others more, without a term in
the loss (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024): once an optimizer step, by what all ranks
counted in the forward passes of its microbatches, with those that do not count in the loss."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from mlpipe.plan.plan import TrainPlan
from mlpipe.train.models.moe import MoE
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World

# Upper bounds of an expert's tokens over the mean of its layer; no step of millions of tokens needs more.
LOAD_BOUNDS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, math.inf)


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """After all techniques that say what happens around a microbatch and after a step."""
    layers = [module for module in model.built.model.modules() if isinstance(module, MoE)]
    rate = plan.model.build.args["balance_rate"]
    balance = _Balance(model, layers, rate, world)
    model.gradient_sync, model.step_metrics = balance.around, balance.end_step


class _Balance:
    """`counts_LE`: rows of each layer's experts on this rank, since the first microbatch of the step."""

    def __init__(self, model: ParallelizedModel, layers: list[MoE], rate: float, world: World) -> None:
        self.sync = model.gradient_sync
        self.rate, self.size = rate, world.size
        shape = (len(layers), layers[0].num_experts)
        self.counts_LE = torch.zeros(shape, dtype=torch.int64, device=world.device)
        for layer, counts_E in zip(layers, self.counts_LE, strict=True):
            layer.counted = counts_E
        self.biases = [layer.gate.e_score_correction_bias for layer in layers]
        self.all_reduce = model.waits.timed(dist.all_reduce)
        self.first, self.tells = True, world.rank == 0

    @contextmanager
    def around(self, last: bool) -> Iterator[None]:
        """Steps that only probe leave counts behind."""
        if self.first:
            self.counts_LE.zero_()
        self.first = last
        inner: AbstractContextManager[None] = self.sync(last)
        with inner:
            yield

    @torch.no_grad()
    def end_step(self) -> dict[str, Any]:
        """Moves the biases, on every rank alike, and says why. Not in `after_step`, which is called after a
        checkpoint was loaded, too."""
        if self.size > 1:
            self.all_reduce(self.counts_LE)
        counts_LE = self.counts_LE.float()
        mean_L1 = counts_LE.mean(1, keepdim=True)
        torch._foreach_add_(self.biases, list((mean_L1 - counts_LE).sign()), alpha=self.rate)
        if not self.tells:
            return {}
        load_LE = (counts_LE / mean_L1).tolist()
        counts = [0] * len(LOAD_BOUNDS)
        for load in chain.from_iterable(load_LE):
            counts[bisect_left(LOAD_BOUNDS, load)] += 1
        return {
            "expert_max_load_ratio": {str(layer): max(loads) for layer, loads in enumerate(load_LE)},
            "experts_by_load_ratio": dict(zip(map(str, LOAD_BOUNDS), counts, strict=True)),
        }
