"""How the ranks of a training stand to each other: the axes along which its work is split over them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from mlpipe._core.pipelines import Schedule


@dataclass(frozen=True)
class Mesh:
    """Sizes of the named axes of the device mesh, outermost first: ranks that are neighbours along `tp` have
    neighbouring numbers. An axis of size 1 does nothing.

    The ranks of one `pp`, `cp` or `tp` group work on the same samples; those of `dp_replicate` and `dp_shard`
    read different ones. `ep` is no further factor of the world: as in torchtitan, it groups neighbours along
    `dp_shard`, which hold different experts.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        sizes = vars(self)
        if min(sizes.values()) < 1:
            raise ValueError(f"an axis of a mesh has at least one rank: {sizes}")
        if self.dp_shard % self.ep:
            raise ValueError(f"ep {self.ep} does not divide dp_shard {self.dp_shard}")

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the axes that multiply to the world, outermost first."""
        return {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }

    @property
    def larger_axes(self) -> dict[str, int]:
        """Sizes of those with more than one rank, `ep` among them."""
        return {axis: size for axis, size in vars(self).items() if size > 1}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        # of all axes, without a dictionary: it is asked for thousands of times by a search
        return math.prod((self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp))

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks_per_data_rank(self) -> int:
        """Number of ranks that read the same samples."""
        return self.pp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis."""
        coordinates, rest = {}, rank
        for axis, size in reversed(self.axes.items()):
            rest, coordinates[axis] = divmod(rest, size)
        if rest or rank < 0:
            raise ValueError(f"rank {rank} is not one of {self.world_size}")
        return {axis: coordinates[axis] for axis in self.axes} | {"ep": coordinates["dp_shard"] % self.ep}

    def nodes_of_weights(self, each: int) -> int | None:
        """Nodes, of `each` ranks, of one group of ranks that share weights: neighbours by number. None where
        a node belongs to two groups."""
        nodes, rest = divmod(self.dp_shard * self.cp * self.tp, each)
        return nodes if rest == 0 else None

    def number_at(self, place: int, each: int) -> int:
        """Of the node, of `each` ranks, whose machine has that place in its gang. Schedulers give machines
        that stand near each other neighbouring places; here all ranks of one stage have numbers before those
        of the next. So that the nodes of one pipeline are neighbours, they have neighbouring places."""
        nodes = self.nodes_of_weights(each)
        if nodes is None:
            return place
        group, node = divmod(place, nodes)
        pipeline, stage = divmod(group, self.pp)
        return (stage * self.dp_replicate + pipeline) * nodes + node

    def data_rank(self, rank: int) -> int:
        """Which of the `num_data_ranks` parts of the samples `rank` reads."""
        at = self.coordinates(rank)
        return at["dp_replicate"] * self.dp_shard + at["dp_shard"]

    def holds_loss(self, rank: int) -> bool:
        """Whether this rank's sums of the loss, targets and tokens count in the world's. Exactly one rank has
        each part of the batch: one of the last pipeline stage, of a tensor-parallel group the first."""
        at = self.coordinates(rank)
        return at["pp"] == self.pp - 1 and at["tp"] == 0


class PipelinePlan(NamedTuple):
    """How the ranks of the axis `pp` share a step, see `plan/pipelining.py`. Its microbatches are those of
    the step's gradient accumulation. `num_blocks`: of each stage; stage `s` lies on rank `s % pp`. `cut`: of
    a user's own model instead the modules with which the stages behind the first begin; neither: the trainer
    cuts it by FLOPs."""

    schedule: Schedule
    num_blocks: tuple[int, ...]
    cut: tuple[str, ...] = ()
