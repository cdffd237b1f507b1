"""Every worker has the whole model; gradients are averaged. They are views of the communication buckets
(`gradient_as_bucket_view`), so the buckets cost nothing more."""

from __future__ import annotations

from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh
from mlpipe.plan.strategies import single

SHARDS = "nothing"


def mesh(num_nodes: int, devices_per_node: int) -> Mesh | str:
    return Mesh(dp_replicate=num_nodes * devices_per_node)


def memory(counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate:
    return single.memory(counts, work, mesh)
