"""FSDP2 within each node, copies across nodes: the slow links carry gradients only."""

from __future__ import annotations

from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import fsdp
from mlpipe.plan.time import Passes, Wire

SHARDS = "weights, gradients and optimizer states, within a node"
FLAGS: dict[str, bool] = {}


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    if num_nodes < 2 or devices_per_node < 2:
        return (
            f"hsdp shards within nodes and copies across them; {num_nodes} x {devices_per_node} has not both"
        )
    return Mesh(dp_replicate=num_nodes, dp_shard=devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    return fsdp.memory(counts, work, mesh)


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    return fsdp.traffic(passes, wire, mesh, reshard=True)


def updated(counts: Counts, mesh: Mesh) -> int:
    return fsdp.updated(counts, mesh)
