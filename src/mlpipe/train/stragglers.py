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

from mlpipe.plan.shares import Shares, SharesOfStages
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.loop import Loop
from mlpipe.train.outcome import node_name
from mlpipe.train.schedules import LossSum
from mlpipe.train.slow_nodes import SlowNodes


@dataclass
class WatchingLoop(Loop):
    """Names nodes that are slow for long, and deals nothing by it. `told`: seconds that this rank took for a
    unit of work in the last step. `nodes`: of each rank, by name."""

    shares: SharesOfStages = field(init=False)
    nodes: list[str] = field(init=False)
    slow_nodes: SlowNodes = field(init=False)
    work: float = 0.0
    told: float = 0.0

    def __post_init__(self) -> None:
        mesh = self.plan.mesh
        stages: list[list[int]] = [[] for _ in range(mesh.pp)]
        for rank in range(mesh.world_size):
            stages[mesh.coordinates(rank)["pp"]].append(rank)
        speeds = self.plan.speeds  # of data ranks; each stage has all of them, in the same order
        expected = None if speeds is None else [speeds[mesh.data_rank(rank)] for rank in stages[0]]
        self.shares = SharesOfStages(stages, expected)
        self.slow_nodes = SlowNodes(self.session.stop.scratch)
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
        self.heard(told[len(totals) :].tolist())

    def heard(self, seconds: Sequence[float]) -> None:
        """What each rank took for a unit of its work."""
        self.shares.heard(seconds)

    def more_fields(self) -> dict[str, Any]:
        """Who is slow, too."""
        world, fields, slowness = self.session.world, super().more_fields(), self.shares.slowness
        if slowness:
            fields["slowness_ratio"] = slowness[world.rank]
        if slowness and world.rank == 0:
            if slow := self.shares.stragglers:
                fields["stragglers"] = {str(rank): ratio for rank, ratio in slow.items()}
            self.slow_nodes.tell((self.nodes[rank], ratio) for rank, ratio in slow.items())
        return fields


@dataclass
class MovingLoop(WatchingLoop):
    """Each of its data ranks reads samples of its own, the fewer the slower the slowest of its ranks is.
    `counted`: tokens of this rank in the last step."""

    moved: Shares = field(init=False)
    counted: int = 0
    share_ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.moved = Shares(self.plan.mesh.num_data_ranks, self.plan.speeds)

    def gradients(self, number: int, batches: Sequence[Microbatch]) -> LossSum:
        """As ever."""
        self.counted = sum(one.num_tokens for one in batches if one.counts)
        return super().gradients(number, batches)

    def total(self, totals: Tensor) -> None:
        """And who reads how many from now on."""
        super().total(totals)
        num_ranks = self.session.world.num_gradient_ranks
        self.share_ratio = self.counted * num_ranks / max(float(totals[3]), 1.0)
        self.reader.loader.speeds = self.moved.speeds

    def heard(self, seconds: Sequence[float]) -> None:
        """Those of a data rank wait for each other within a microbatch."""
        super().heard(seconds)
        mesh = self.plan.mesh
        slowest = [0.0] * mesh.num_data_ranks
        for rank, told in enumerate(seconds):
            slowest[mesh.data_rank(rank)] = max(told, slowest[mesh.data_rank(rank)])
        self.moved.heard(slowest)

    def more_fields(self) -> dict[str, Any]:
        """With its share."""
        return super().more_fields() | {"share_ratio": self.share_ratio}
