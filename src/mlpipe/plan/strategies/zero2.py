"""FSDP2 without resharding after the forward pass: the gathered weights stay until the backward pass has
used them, so they are gathered once a step, not twice."""

from __future__ import annotations

from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import fsdp
from mlpipe.plan.time import Passes, Wire

SHARDS = "gradients and optimizer states"
FLAGS = {"reshard_after_forward": False}


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return fsdp.mesh(num_nodes, devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    return fsdp.sharded(counts, work, mesh, reshard=False)


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    return fsdp.traffic(passes, wire, mesh, reshard=False)


def updated(counts: Counts, mesh: Mesh) -> int:
    return fsdp.updated(counts, mesh)
