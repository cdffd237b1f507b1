"""The loop of a training that moves work off slow ranks: `plan/shares.py` decides, on all ranks alike, by the
time that each tells with the sums of a step. A step's samples and its update stay what they are.

What is read ahead has the shares of before: a decision shows two steps later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe.plan.shares import Shares
from mlpipe.train.loop import Loop
from mlpipe.train.microbatch import Microbatch
from mlpipe.train.outcome import node_name, write_slow
from mlpipe.train.schedules import LossSum


@dataclass
class MovingLoop(Loop):
    """Each of its ranks reads samples of its own. `told`: seconds that this one took for a unit of work in
    the last step. `nodes`: of each rank, by name; `named`: those that were told to be slow last, None while
    nobody knows."""

    shares: Shares = field(init=False)
    nodes: list[str] = field(init=False)
    named: dict[str, float] | None = None
    work: float = 0.0
    told: float = 0.0
    share_ratio: float = 1.0

    def __post_init__(self) -> None:
        num_ranks = self.session.world.num_data_ranks
        self.shares = Shares(num_ranks, self.plan.speeds)
        self.nodes = [""] * num_ranks
        dist.all_gather_object(self.nodes, node_name())

    def step(self) -> tuple[bool, bool]:
        """As ever; then this rank knows how long it took."""
        agreed = super().step()
        last = self.recording.last
        assert last is not None
        own = (last.compute_seconds or 0.0) + (last.data_seconds or 0.0)
        self.told = own / self.work if self.work else 0.0
        return agreed

    def gradients(self, number: int, batches: Sequence[Microbatch]) -> LossSum:
        """As ever."""
        self.work = sum(one.num_tokens if one.work is None else one.work[0] for one in batches)
        return super().gradients(number, batches)

    def total(self, totals: Tensor) -> None:
        """With what each rank has to tell."""
        world, num_tokens = self.session.world, float(totals[3])
        everyone = totals.new_zeros(world.num_data_ranks)
        everyone[world.data_rank] = self.told
        told = torch.cat([totals, everyone])
        dist.all_reduce(told)
        totals.copy_(told[: len(totals)])
        self.share_ratio = num_tokens * world.num_data_ranks / max(float(totals[3]), 1.0)
        self.shares.heard(told[len(totals) :].tolist())
        self.reader.loader.speeds = self.shares.speeds

    def more_fields(self) -> dict[str, Any]:
        """Who is slow, too."""
        world, slowness = self.session.world, self.shares.slowness
        fields: dict[str, Any] = {"share_ratio": self.share_ratio}
        if slowness is not None:
            fields["slowness_ratio"] = slowness[world.data_rank]
        if world.rank == 0 and slowness is not None:
            if slow := self.shares.stragglers:
                fields["stragglers"] = {str(rank): ratio for rank, ratio in slow.items()}
            self._name_nodes(slow)
        return super().more_fields() | fields

    def _name_nodes(self, slow: dict[int, float]) -> None:
        """To the launcher; a node is as slow as its slowest rank."""
        named: dict[str, float] = {}
        for rank, ratio in slow.items():
            named[self.nodes[rank]] = max(round(ratio, 1), named.get(self.nodes[rank], 0.0))
        if named != self.named:
            write_slow(self.session.stop.scratch, named)
            self.named = named
