"""The microbatches of samples that differ in length: padded, a sample a row; or packed, several in one row,
and balanced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from mlpipe.plan.dealing import (
    Device,
    Mode,
    Row,
    best_fit_decreasing,
    cost_of_samples,
    cost_of_step,
    deal,
    deal_freely,
    waits_of,
    work_of,
)
from mlpipe.plan.settings import Communication
from mlpipe.plan.shapes import presets
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.microbatch import Microbatch, uncounted
from mlpipe.train.data.uneven_samples import UnevenSamples
from mlpipe.train.model import DOCUMENTS
from mlpipe.train.world import World


class UnevenLoader(MicrobatchLoader):
    """Rows of a packed microbatch, of which it has one, hold `micro_batch * seq_len` tokens at the most."""

    samples: UnevenSamples
    packing: Mode | None
    cost: Callable[[int], float]
    communication: Communication

    def step(self, position: int) -> list[Microbatch]:
        """As the base class says."""
        if self.packing is None:
            return super().step(position)
        indices = self._order(position, self.global_batch)
        lengths = self.samples.lengths[indices].tolist()
        costs = [self.cost(length) for length in lengths]
        capacity = self.micro_batch * self.seq_len
        rank, num_ranks = self.share
        least = [int(np.argmin(lengths))]
        # ranks that send each other rows for their experts have equally many, whenever weights are gathered
        if self.communication != "collective" and self.world.mesh.ep == 1:
            dealt = deal_freely(lengths, costs, num_ranks, capacity, self.packing, self.speeds)
            return self._freely(indices, costs, dealt, least)
        dealt = deal(lengths, costs, num_ranks, capacity, self.packing)
        packed = []
        for number, row in enumerate(dealt[rank]):
            work = [sum(costs[sample] for sample in rows[number] or least) for rows in dealt]
            one = replace(self._packed(indices[row or least]), work=(work[rank], max(work)))
            packed.append(one if row else uncounted(one))
        return packed

    def _freely(
        self, indices: NDArray[np.int64], costs: Sequence[float], dealt: list[list[Row]], least: Row
    ) -> list[Microbatch]:
        """One at the least where the rank meets the others in it. `work`: of all of a step, against that in
        which all ranks are done."""
        rows = dealt[self.share[0]]
        if not rows and self.communication == "on_demand":
            return []
        each = [sum(costs[sample] for sample in row) for row in rows or [least]]
        speeds = self.speeds or [1.0] * len(dealt)
        works = zip(work_of(dealt, costs), speeds, strict=True)
        seconds = [[work / speed for work in rows] for rows, speed in works]
        waits = waits_of(self.communication, self.world.mesh)
        device: Device = "cuda" if self.world.device.type == "cuda" else "cpu"
        most = cost_of_step(seconds, waits, device) * speeds[self.share[0]]
        packed = [
            replace(self._packed(indices[row]), work=(work, work * max(1.0, most / sum(each))))
            for row, work in zip(rows or [least], each, strict=True)
        ]
        return packed if rows else [uncounted(packed[0])]

    def largest(self) -> list[Microbatch]:
        """Two of the most tokens that a microbatch may have, for the memory probe."""
        longest = np.argsort(-self.samples.lengths, kind="stable")[: self.global_batch]
        if self.packing is None:
            one = self._microbatch(longest[: self.micro_batch])
        else:
            lengths = self.samples.lengths[longest].tolist()
            rows = best_fit_decreasing(lengths, self.micro_batch * self.seq_len)
            one = self._packed(longest[max(rows, key=lambda row: sum(lengths[sample] for sample in row))])
        return [one, one]

    def _microbatch(self, indices: NDArray[np.int64]) -> Microbatch:
        one = super()._microbatch(indices)
        return replace(one, num_padding=one.num_tokens - int(self.samples.lengths[indices].sum()))

    def _packed(self, indices: NDArray[np.int64]) -> Microbatch:
        samples = [self.samples.sample(index) for index in indices.tolist()]
        inputs, targets = (np.concatenate(parts)[None] for parts in zip(*samples, strict=True))
        batch = {
            "inputs": torch.from_numpy(inputs),
            "targets": torch.from_numpy(targets),
            DOCUMENTS: torch.from_numpy(self.samples.lengths[indices]),
        }
        return Microbatch(batch, inputs.size, num_padding=0)


def uneven_loader(plan: TrainPlan, samples: UnevenSamples, world: World, micro_batch: int) -> UnevenLoader:
    """As the plan says."""
    loader = UnevenLoader.of(plan, samples, world, micro_batch)
    cost = cost_of_samples(presets.planned(plan.model))
    loader.samples, loader.packing, loader.cost = samples, plan.data.packed, cost
    loader.communication = plan.communication
    return loader
