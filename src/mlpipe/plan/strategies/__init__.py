"""One file a strategy. Each has

    mesh(num_nodes, devices_per_node) -> Mesh, or why there is none, in words
    memory(counts, work, mesh) -> MemoryEstimate
    exposed(passes, wire, mesh) -> seconds of communication in a step that computing does not hide
    updated(counts, mesh) -> parameters that a rank updates
    FLAGS, the fields of a TrainPlan that say with the mesh what is applied, where they are not the defaults

`ORDER` is from the least sharded to the most: among equally fast ones `auto` takes the first.
"""

from __future__ import annotations

from typing import Protocol

from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh, Strategy
from mlpipe.plan.strategies import ddp, fsdp, hsdp, single, zero1, zero2
from mlpipe.plan.time import Passes, Wire


class StrategyFile(Protocol):
    SHARDS: str
    FLAGS: dict[str, bool]

    def mesh(self, num_nodes: int, devices_per_node: int) -> Mesh | str: ...

    def memory(self, counts: Counts, work: Work, mesh: Mesh) -> MemoryEstimate: ...

    def exposed(self, passes: Passes, wire: Wire, mesh: Mesh) -> float: ...

    def updated(self, counts: Counts, mesh: Mesh) -> int: ...


ORDER: dict[Strategy, StrategyFile] = {
    "single": single,
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "hsdp": hsdp,
    "fsdp": fsdp,
}
