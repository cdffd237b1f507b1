"""Every worker has the whole model, and a slice of the optimizer states."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "the optimizer states"
FLAGS = {"shard_optimizer": True}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    return [Mesh(dp_replicate=num_nodes * devices_per_node)]
