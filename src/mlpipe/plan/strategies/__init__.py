"""One file a strategy: a name for settings of the mesh and its flags, nothing else. Each has

    SHARDS, what it splits, in words
    FLAGS, the fields of a TrainPlan that say with the mesh what is applied, where they are not the defaults
    meshes(num_nodes, devices_per_node) -> meshes to choose from, the usual one first, or why there is none

`ORDER` is from the least sharded to the most: among equally fast ones `auto` takes the first.
"""

from __future__ import annotations

from typing import Protocol

from mlpipe._core.meshes import Strategy
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.strategies import ddp, fsdp, hsdp, single, zero1, zero2


class StrategyFile(Protocol):
    """A file of this folder: see above."""

    SHARDS: str
    FLAGS: dict[str, bool]

    def meshes(self, num_nodes: int, devices_per_node: int) -> list[Mesh] | str: ...


ORDER: dict[Strategy, StrategyFile] = {
    "single": single,
    "ddp": ddp,
    "zero1": zero1,
    "zero2": zero2,
    "hsdp": hsdp,
    "fsdp": fsdp,
}
