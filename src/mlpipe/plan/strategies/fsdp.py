"""All states are split over all workers; each block's weights are gathered when it is computed."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "weights, gradients and optimizer states"
FLAGS: dict[str, bool] = {}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    return [Mesh(dp_shard=num_nodes * devices_per_node)]
