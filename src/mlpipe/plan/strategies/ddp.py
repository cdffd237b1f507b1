"""Every worker has the whole model; gradients are averaged. They are views of the communication buckets
(`gradient_as_bucket_view`), so the buckets cost nothing more."""

from __future__ import annotations

import dataclasses

from mlpipe.plan.memory import GRADIENT_BYTES, Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import single
from mlpipe.plan.time import Passes, Wire

SHARDS = "nothing"
FLAGS: dict[str, bool] = {}
_BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return Mesh(dp_replicate=num_nodes * devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    """The buckets live from the first step on, so gradients take no other's place."""
    return dataclasses.replace(single.memory(counts, work, mesh), reused=0)


def exposed(passes: Passes, wire: Wire, mesh: Mesh) -> float:
    """The gradients' buckets are reduced beside the last backward pass; the last bucket has nothing left to
    hide behind (Li et al., PyTorch Distributed, 2020)."""
    ranks = mesh.num_data_ranks
    reduction = wire.all_reduce(GRADIENT_BYTES * passes.num_params, ranks)
    if not passes.overlap:
        return reduction
    last = wire.all_reduce(min(_BUCKET_BYTES, GRADIENT_BYTES * passes.num_params), ranks)
    return max(last, reduction - passes.backward)


def updated(counts: Counts, mesh: Mesh) -> int:
    return counts.total
