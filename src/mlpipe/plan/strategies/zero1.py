"""DDP whose optimizer states are split over the workers."""

from __future__ import annotations

import dataclasses

from mlpipe.plan.memory import ADAM_BYTES, Activations, Counts, MemoryEstimate
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import ddp

SHARDS = "the optimizer states"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return ddp.mesh(num_nodes, devices_per_node)


def memory(counts: Counts, activations: Activations, mesh: Mesh, precision: str) -> MemoryEstimate:
    whole = ddp.memory(counts, activations, mesh, precision)
    return dataclasses.replace(whole, optimizer=ADAM_BYTES * -(-counts.num_params // mesh.world_size))
