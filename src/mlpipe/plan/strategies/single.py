"""One worker, nothing to communicate."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "nothing"
FLAGS: dict[str, bool] = {}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    if num_nodes * devices_per_node != 1:
        return f"single is one worker, and there are {num_nodes * devices_per_node}"
    return [Mesh()]
