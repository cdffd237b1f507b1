"""Experts that had more tokens than the mean become a little less likely, the others more, without a term in
the loss (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024): once an optimizer step, by what all ranks
counted in the forward passes of its microbatches, with tokens whose targets do not count in the loss."""

from __future__ import annotations

from bisect import bisect_left
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from mlpipe._core.records import LOAD_BOUNDS
from mlpipe.plan.work import TrainPlan
from mlpipe.train.models.moe import MoE
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.world import World


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """After all techniques that say what happens around the passes of a step and after it."""
    balance = _Balance(model, plan.model.build.args["balance_rate"], world)
    model.before_forward = balance.before_forward
    model.after_backward, model.step_metrics = balance.after_backward, balance.end_step


_KEPT = 0.95  # of the average's tokens a step, so that it is of about 20 steps


class _Balance:
    """`counts_LE`: rows of each expert of all layers, of which this rank may have some, since the first
    microbatch of the step, and behind them those that were dropped, if any may be; `told_LE`: the same of
    all ranks, on the host of the rank that tells, and `average_LE` of the last steps, times a number."""

    def __init__(self, model: ParallelizedModel, rate: float, world: World) -> None:
        self.after_others = model.after_backward
        self.rate, self.size = rate, world.size
        layers = [module for module in model.built.model.modules() if isinstance(module, MoE)]
        self.drops = layers[0].capacity_factor is not None
        shape = (len(layers), layers[0].num_experts + self.drops)
        self.counts_LE = torch.zeros(shape, dtype=torch.int64, device=world.device)
        self.own = [number for number, layer in enumerate(layers) if not layer.gate.weight.is_meta]
        self.layers = [(layers[number], self.counts_LE[number]) for number in self.own]
        self.biases = [layer.gate.e_score_correction_bias for layer, _ in self.layers]
        self.all_reduce = model.waits.timed(dist.all_reduce)
        self.first = True
        on_gpu = world.device.type == "cuda"
        self.told_LE = torch.zeros(shape, dtype=torch.int64, pin_memory=on_gpu) if world.rank == 0 else None
        self.average_LE = torch.zeros(len(layers), layers[0].num_experts)

    def before_forward(self, counts: bool) -> None:
        """`counts`: whether the tokens of this microbatch do. Steps that only probe leave counts behind."""
        if self.first:
            self.counts_LE.zero_()
            self.first = False
        for layer, counts_E in self.layers:
            layer.counted = counts_E if counts else None

    @torch.no_grad()
    def after_backward(self) -> None:
        """Here, and not at the end of the step: what goes to the host is there when the loop has waited for
        the loss, so that nobody waits for the device again."""
        self.after_others()
        self.first = True
        if self.size > 1:
            self.all_reduce(self.counts_LE)
        if self.told_LE is not None:
            self.told_LE.copy_(self.counts_LE, non_blocking=True)

    @torch.no_grad()
    def end_step(self) -> dict[str, Any]:
        """Moves the biases, on every rank alike, and says why. Not in `after_step`, which is called after a
        checkpoint was loaded, too."""
        num_experts = self.average_LE.shape[1]
        counts_LE = self.counts_LE[self.own, :num_experts].float()
        mean_L1 = counts_LE.mean(1, keepdim=True)
        torch._foreach_add_(self.biases, list((mean_L1 - counts_LE).sign()), alpha=self.rate)
        if self.told_LE is None:
            return {}
        told_LE, dropped_L = self.told_LE[:, :num_experts], self.told_LE[:, num_experts:]
        self.average_LE.mul_(_KEPT).add_(told_LE)
        load_LE, average_LE = _over_mean(told_LE.float()), _over_mean(self.average_LE)
        counts = [0] * len(LOAD_BOUNDS)
        for load in chain.from_iterable(load_LE):
            counts[bisect_left(LOAD_BOUNDS, load)] += 1
        return {
            "expert_max_load_ratio": {str(layer): max(loads) for layer, loads in enumerate(load_LE)},
            "expert_max_average_load_ratio": {str(layer): max(own) for layer, own in enumerate(average_LE)},
            "experts_by_load_ratio": dict(zip(map(str, LOAD_BOUNDS), counts, strict=True)),
            **({"expert_dropped_ratio": float(dropped_L.sum() / told_LE.sum())} if self.drops else {}),
        }


def _over_mean(counts_LE: torch.Tensor) -> list[list[float]]:
    """Of each layer."""
    loads: list[list[float]] = (counts_LE / counts_LE.mean(1, keepdim=True)).tolist()
    return loads
