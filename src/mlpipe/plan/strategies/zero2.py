"""All states are split over all workers; gathered weights stay until the backward pass has used them."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "gradients and optimizer states"
FLAGS = {"reshard_after_forward": False}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    return [Mesh(dp_shard=num_nodes * devices_per_node)]
