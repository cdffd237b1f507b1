"""One file an axis of the mesh: what it divides, what it sends, and what hides that. Each has

    divide(tensors, work) -> the tensors that a rank has where the axis splits them
    exposed_seconds(passes, wire, layout) -> communication in a step that computing does not hide

`AXES` are applied in this order. What the trainer can split over is another matter: `_core/meshes.py`.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import cast

from mlpipe.plan.axes.axis import Axis
from mlpipe.plan.mesh import Mesh

AXES = ("tp", "dp_shard", "dp_replicate", "cp", "pp", "ep")


@lru_cache(maxsize=256)  # asked for twice by every candidate
def active(mesh: Mesh) -> tuple[Axis, ...]:
    """Those that are larger than 1; where nothing is sharded, the gradients are reduced over `cp` as over
    `dp_replicate`."""
    sizes = mesh.larger_axes
    if mesh.cp > 1 == mesh.dp_shard:
        sizes["dp_replicate"] = mesh.dp_replicate * mesh.cp
    return tuple(by_name(name) for name in AXES if name in sizes)


@lru_cache
def by_name(name: str) -> Axis:
    """Imported only for who has it."""
    return cast(Axis, import_module(f"mlpipe.plan.axes.{name}"))
