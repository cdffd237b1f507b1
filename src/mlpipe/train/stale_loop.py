"""Islands that need not be at the same step (`update`'s `staleness`, S): what ranks tell each other in every
step is heard S steps later, so that one waits only for those that are more than S steps behind it (Ho et al.,
Stale Synchronous Parallel, 2013).

Before a checkpoint, a validation and the end all are at the same step.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.train.loop import Loop
from mlpipe.train.optim.islands import settle
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.parallel.waits import Waits


@dataclass
class StaleLoop(Loop):
    """`agreeing`: what of the last steps is on its way, with whether this rank's own figures were finite.
    `heard`: which ranks are not finite, want to stop and to save, of steps that no step has looked at."""

    agreeing: deque[tuple[Any, Tensor, bool]] = field(default_factory=deque)
    heard: list[int] = field(default_factory=lambda: [0, 0, 0])
    own_is_finite: bool = True

    def __post_init__(self) -> None:
        world = self.session.world
        assert self.plan.islands is not None
        self.staleness = self.plan.islands.staleness
        self.num_islands = world.place("dp_replicate")[1]
        # the loop's clock has what is waited for here: waits of the model would be counted twice
        self.island = RankGroup.along("dp_shard", world, Waits()) if world.mesh.dp_shard > 1 else None
        self.group: Any = dist.new_group()

    def step(self) -> tuple[bool, bool]:
        """All know by themselves when a save is due by the number of steps, at the same one."""
        self.session.stop.begun.set()  # islands that are ahead may have taken steps
        stopping, save_now = super().step()
        every = self.plan.checkpoint.every_steps
        return stopping, save_now if every is None else self.position.step % every == 0

    def is_save_due(self, step: int) -> bool:
        """By the clock, which rank 0 tells the others."""
        return self.plan.checkpoint.every_steps is None and super().is_save_due(step)

    def total(self, totals: Tensor) -> None:
        """Of the first four the sums as if all islands had what this one has; of who wants to stop and save
        what all said `staleness` steps ago."""
        wants = totals[4:].clone()
        if self.island is not None:
            self.island.all_reduce(totals)
        is_finite = all(map(math.isfinite, totals[:3].tolist()))
        told = torch.cat([torch.tensor([float(not is_finite)], dtype=torch.float64), wants])
        self.agreeing.append((dist.all_reduce(told, group=self.group, async_op=True), told, is_finite))
        while len(self.agreeing) > self.staleness:
            self.hear()
        totals[:4] *= self.num_islands
        totals[4], totals[5] = self.heard[1:]
        self.heard[1:] = 0, 0

    def hear(self) -> None:
        """What was told first of what nobody has looked at."""
        work, told, is_finite = self.agreeing.popleft()
        work.wait()
        not_finite, stop, asks = map(int, told.tolist())
        if not_finite and not self.heard[0]:
            self.own_is_finite = is_finite
        self.heard = [self.heard[0] + not_finite, self.heard[1] + stop, self.heard[2] | asks]

    def is_finite(self, *totals: float) -> bool:
        """As far as this rank has heard."""
        return not self.heard[0]

    def not_finite(self, step: int, local_loss: float) -> TrainError:
        """Of a step that is up to `staleness` ago."""
        return super().not_finite(step, 0.0 if self.own_is_finite else math.nan)

    def validate(self) -> bool:
        """Of anchors that have all that was told."""
        self.settle()
        return super().validate()

    def save(self, *, best: bool = False) -> None:
        """Of islands at the same step, of which nothing is on its way."""
        self.settle()
        super().save(best=best)

    def settle(self) -> None:
        """Raises TrainError for figures that are not finite."""
        while self.agreeing:
            self.hear()
        if self.heard[0]:
            raise self.not_finite(self.position.step, 0.0)
        settle(self.update)
        self.model.waits.take()  # of no step
