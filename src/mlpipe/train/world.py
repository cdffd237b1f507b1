"""Who this rank is among the others. Everybody asks here; nobody derives it from the rank and the number of
ranks, since ranks of one tensor, context or pipeline group work on the same samples.

Axes whose names are joined by "+", outermost first, count as one: `dp_shard+cp` has the ranks of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mlpipe.plan.mesh import Mesh

EXPERT_SHARD = "expert_shard"  # ranks of `dp_shard` that have the same experts
_OF_DP_SHARD = {"ep": "dp_shard", EXPERT_SHARD: "dp_shard"}  # what is split over one is over both


@dataclass(frozen=True)
class World:
    """The plan's mesh and this rank's place on it. `device`: what this rank computes on. Process groups are
    made when one is asked for: the default group serves an axis that spans the world."""

    mesh: Mesh
    rank: int
    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.mesh.world_size

    @cached_property
    def coordinates(self) -> dict[str, int]:
        """This rank's place by axis."""
        return self.mesh.coordinates(self.rank)

    @cached_property
    def data_rank(self) -> int:
        """Which of the `num_data_ranks` parts of the samples this rank works on."""
        return self.mesh.data_rank(self.rank)

    @property
    def num_data_ranks(self) -> int:
        """Number of groups of ranks that work on different samples."""
        return self.mesh.num_data_ranks

    @property
    def num_gradient_ranks(self) -> int:
        """Over how many ranks gradients are averaged: those that work on different parts of the batch, which
        are its samples and, along `cp`, parts of each sequence."""
        return self.num_data_ranks * self.mesh.cp

    def place(self, axis: str) -> tuple[int, int]:
        """This rank's number along an axis, and how many there are."""
        number, size = 0, 1
        for part in axis.split("+"):
            number, size = number * self.mesh.axes[part] + self.coordinates[part], size * self.mesh.axes[part]
        return number, size

    @cached_property
    def holds_loss(self) -> bool:
        """Whether this rank's sums of the loss, targets and tokens count in the world's."""
        return self.mesh.holds_loss(self.rank)

    def peer(self, axis: str, coordinate: int) -> int:
        """The rank that stands at `coordinate` of `axis`, and elsewhere where this one does."""
        inner = list(self.mesh.axes)[list(self.mesh.axes).index(axis) + 1 :]
        stride = math.prod(self.mesh.axes[name] for name in inner)
        return self.rank + (coordinate - self.coordinates[axis]) * stride

    @property
    def first_with_loss(self) -> int:
        """Of the ranks that hold the loss (and the logits) the first."""
        return self.mesh.world_size // self.mesh.pp * (self.mesh.pp - 1)

    def replica(self, *split: str) -> tuple[int, int]:
        """Of a tensor that is split over the axes `split`, and the same along all others: which of its
        replicas this rank holds, and how many there are. Stages of a pipeline have different tensors."""
        parts = {"pp", *(_OF_DP_SHARD.get(part, part) for axis in split for part in axis.split("+"))}
        index, number = 0, 1
        for axis, size in self.mesh.axes.items():
            if axis not in parts:
                index, number = index * size + self.coordinates[axis], number * size
        return index, number

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """Of those of `axes` that have more than one rank; they are named outermost first."""
        whole = self._device_mesh
        wanted = tuple(name for axis in axes if (name := self._larger(axis)))
        if wanted == whole.mesh_dim_names:
            return whole
        if not any("+" in name for name in wanted):
            return whole[wanted]
        meshes = [
            whole[tuple(name.split("+"))]._flatten(name) if "+" in name else whole[name] for name in wanted
        ]
        return meshes[0] if len(meshes) == 1 else DeviceMesh._concatenate(meshes)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Of the ranks that differ from this one along `axis` only. None: the default group is this one."""
        if self.place(axis)[1] == self.size:
            return None
        return self.device_mesh(axis).get_group()

    def group_of_its_own(self, axis: str) -> dist.ProcessGroup:
        """As `group`, a new one, for what travels beside other collectives: all of one group are issued in
        the same order on every rank. To be called by all ranks."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            elsewhere = tuple(n for name, n in self.mesh.coordinates(rank).items() if name != axis)
            rows.setdefault(elsewhere, []).append(rank)
        group: Any = dist.new_subgroups_by_enumeration(list(rows.values()))[0]
        own: dist.ProcessGroup = group
        return own

    @cached_property
    def experts(self) -> DeviceMesh:
        """The mesh with the ranks of `dp_shard` cut in two: those that have the same experts, and those that
        have different ones (`ep`)."""
        mesh = self.mesh
        sizes = {**mesh.axes, EXPERT_SHARD: mesh.dp_shard // mesh.ep, "ep": mesh.ep}
        names = ("pp", "dp_replicate", EXPERT_SHARD, "ep", "cp", "tp")
        return init_device_mesh(self.device.type, tuple(map(sizes.__getitem__, names)), mesh_dim_names=names)

    @cached_property
    def expert_shards(self) -> DeviceMesh | None:
        """Over which FSDP2 shares a rank's experts: the ranks that have the same ones, with copies along
        `dp_replicate`; None: nobody else has them."""
        mesh, axes = self.mesh, self.experts
        if mesh.dp_replicate * mesh.dp_shard * mesh.cp == mesh.ep:
            return None
        shards = axes[EXPERT_SHARD]
        if mesh.cp > 1:
            shards = axes[(EXPERT_SHARD, "cp")]._flatten(f"{EXPERT_SHARD}+cp")
        return DeviceMesh._concatenate([axes["dp_replicate"], shards]) if mesh.dp_replicate > 1 else shards

    def _larger(self, axis: str) -> str:
        """The axis without parts of one rank."""
        return "+".join(part for part in axis.split("+") if self.mesh.axes[part] > 1)

    @cached_property
    def _device_mesh(self) -> DeviceMesh:
        axes = {axis: size for axis, size in self.mesh.axes.items() if size > 1}
        return init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
