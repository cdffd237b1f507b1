"""DDP whose optimizer states are split over the workers; updated slices are gathered through buffers that
hold the model once more, and a slice."""

from __future__ import annotations

import dataclasses

from mlpipe.plan.memory import ADAM_BYTES, WEIGHT_BYTES, Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import ddp

SHARDS = "the optimizer states"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return ddp.mesh(num_nodes, devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    whole = ddp.memory(counts, work, mesh)
    share = -(-counts.total // mesh.world_size)
    return dataclasses.replace(
        whole,
        optimizer=ADAM_BYTES * share,
        buffers=whole.buffers + WEIGHT_BYTES * (share * mesh.world_size + share),
    )
