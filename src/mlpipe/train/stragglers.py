"""The loops of trainings that name slow ranks, and of those that move work off them: `plan/shares.py`
decides, on all ranks alike, by the time that each tells with the sums of a step. A step's samples and its
update stay what they are.

What is read ahead has the shares of before: a decision shows two steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe.plan.shares import SharesOfStages
from mlpipe.train.loop import Loop
from mlpipe.train.microbatch import Microbatch
from mlpipe.train.outcome import node_name, write_slow
from mlpipe.train.schedules import LossSum


@dataclass
class WatchingLoop(Loop):
    """Names nodes that are slow for long, and deals nothing by it. `told`: seconds that this rank took for a
    unit of work in the last step. `nodes`: of each rank, by name; `named`: those that were told to be slow
    last, None while nobody knows."""

    shares: SharesOfStages = field(init=False)
    nodes: list[str] = field(init=False)
    named: dict[str, float] | None = None
    work: float = 0.0
    told: float = 0.0

    def __post_init__(self) -> None:
        mesh = self.plan.mesh
        stages: list[list[int]] = [[] for _ in range(mesh.pp)]
        for rank in range(mesh.world_size):
            stages[mesh.coordinates(rank)["pp"]].append(rank)
        self.shares = SharesOfStages(stages, self.plan.speeds)
        self.nodes = [""] * mesh.world_size
        dist.all_gather_object(self.nodes, node_name())

    def step(self) -> tuple[bool, bool]:
        """As ever; then this rank knows how long it took."""
        agreed = super().step()
        self.told = self.recording.own_seconds / self.work if self.work else 0.0
        return agreed

    def gradients(self, number: int, batches: Sequence[Microbatch]) -> LossSum:
        """As ever."""
        self.work = sum(one.num_tokens if one.work is None else one.work[0] for one in batches)
        return super().gradients(number, batches)

    def total(self, totals: Tensor) -> None:
        """With what each rank has to tell."""
        world = self.session.world
        everyone = totals.new_zeros(world.size)
        everyone[world.rank] = self.told
        told = torch.cat([totals, everyone])
        dist.all_reduce(told)
        totals.copy_(told[: len(totals)])
        self.shares.heard(told[len(totals) :].tolist())

    def more_fields(self) -> dict[str, Any]:
        """Who is slow, too."""
        world, fields, slowness = self.session.world, super().more_fields(), self.shares.slowness
        if slowness:
            fields["slowness_ratio"] = slowness[world.rank]
        if slowness and world.rank == 0:
            if slow := self.shares.stragglers:
                fields["stragglers"] = {str(rank): ratio for rank, ratio in slow.items()}
            self._name_nodes(slow)
        return fields

    def _name_nodes(self, slow: dict[int, float]) -> None:
        """To the launcher; a node is as slow as its slowest rank."""
        named: dict[str, float] = {}
        for rank, ratio in slow.items():
            named[self.nodes[rank]] = max(round(ratio, 1), named.get(self.nodes[rank], 0.0))
        if named != self.named:
            write_slow(self.session.stop.scratch, named)
            self.named = named


@dataclass
class MovingLoop(WatchingLoop):
    """Each of its ranks reads samples of its own, the fewer the slower it is."""

    share_ratio: float = 1.0

    def total(self, totals: Tensor) -> None:
        """And who reads how many from now on."""
        num_tokens = float(totals[3])
        super().total(totals)
        self.share_ratio = num_tokens * self.session.world.size / max(float(totals[3]), 1.0)
        self.reader.loader.speeds = self.shares.speeds

    def more_fields(self) -> dict[str, Any]:
        """With its share."""
        return super().more_fields() | {"share_ratio": self.share_ratio}
