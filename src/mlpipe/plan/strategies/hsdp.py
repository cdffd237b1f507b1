"""All states are split within each copy of the model. Where a copy is a node, the links between nodes carry
gradients only."""

from __future__ import annotations

from mlpipe.plan.mesh import Mesh

SHARDS = "weights, gradients and optimizer states, within each copy of the model"
FLAGS: dict[str, bool] = {}


def meshes(num_nodes: int, devices_per_node: int) -> list[Mesh] | str:
    """Of whole nodes first; then with replicas within a node, and with shards over several."""
    if num_nodes < 2 or devices_per_node < 2:
        return (
            f"hsdp shards within nodes and copies across them; {num_nodes} x {devices_per_node} has not both"
        )
    world, per_node = num_nodes * devices_per_node, devices_per_node
    within = [n for n in range(2, per_node) if per_node % n == 0]
    several = [n * per_node for n in range(2, num_nodes // 2 + 1) if num_nodes % n == 0]
    sizes = [per_node, *within, *several]
    return [Mesh(dp_replicate=world // n, dp_shard=n) for n in sizes]
