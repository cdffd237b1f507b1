"""Every worker has the whole model."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "nothing"
FLAGS: dict[str, bool] = {}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    return [Mesh(dp_replicate=num_nodes * devices_per_node)]
