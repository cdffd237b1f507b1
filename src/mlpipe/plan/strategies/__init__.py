"""One file a strategy. Each has

    mesh(num_nodes, devices_per_node) -> Mesh, or why there is none, in words
    memory(counts, work, mesh) -> MemoryEstimate

`ORDER` is from the least sharded to the most: `auto` takes the first that fits.
"""

from __future__ import annotations

from typing import Protocol

from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh, Strategy
from mlpipe.plan.strategies import ddp, fsdp, hsdp, single, zero1, zero2


class StrategyFile(Protocol):
    SHARDS: str

    def mesh(self, num_nodes: int, devices_per_node: int) -> Mesh | str: ...

    def memory(self, counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate: ...


ORDER: dict[Strategy, StrategyFile] = {
    "single": single,
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "hsdp": hsdp,
    "fsdp": fsdp,
}
