"""Rules of a training's mesh, as far as the file alone shows them: what `_core/meshes.py` says, where it is
written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlpipe._core import meshes
from mlpipe._core.feasibility import Infeasible
from mlpipe._core.presets import PRESETS
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of


def sizes_of(train: Node, num_workers: int) -> dict[str, int] | Infeasible | None:
    """Of all axes; None: the file names no mesh, or one with mistakes of type, reported as those."""
    mesh = get(train, "mesh")
    if mesh is None or not isinstance(mesh.value, dict):
        return None
    written = {axis: node.value for axis in meshes.AXES if (node := get(mesh, axis)) is not None}
    if not all(_is_size(axis, size) for axis, size in written.items()):
        return None
    return meshes.resolve(written, num_workers)


def _is_size(axis: str, size: Any) -> bool:
    return (type(size) is int and size > 0) or (size == meshes.FILL and axis in meshes.FACTORS)


def problems(train: Node, num_workers: int) -> Iterator[Problem]:
    """Of a mesh that is no size for the workers, of axes that do not split the model, of what the trainer
    cannot combine, of what is said of an axis that there is not."""
    mesh, sizes = get(train, "mesh"), sizes_of(train, num_workers)
    yield from _no_context(train, sizes)
    if mesh is None or sizes is None:
        return
    if isinstance(sizes, Infeasible):
        yield Problem.at(mesh.place, sizes.message, sizes.remedy)
        return
    own = get(train, "model", "entry") is not None
    for axis, conflict in meshes.conflicts(sizes, figures_of(train), own_model=own):
        yield Problem.at((get(mesh, axis) or mesh).place, conflict.message, conflict.remedy)
    for key, conflict in meshes.unsupported_mix(sizes, train.plain(), figures_of(train)):
        node = get(train, *key.split(".")) or get(mesh, key) or mesh
        yield Problem.at(node.place, conflict.message, conflict.remedy)


def _no_context(train: Node, sizes: dict[str, int] | Infeasible | None) -> Iterator[Problem]:
    context = get(train, "context")
    if context is None or isinstance(sizes, Infeasible):
        return
    left = get(train, "mesh") is None and not is_searched(train)
    if left or (sizes is not None and sizes["cp"] == 1):
        yield problem_of_key(
            context, "there is a context, but no mesh with cp", "write mesh: {cp: 2}, or remove it"
        )


def is_searched(train: Node) -> bool:
    """Whether the planner may choose axes whose workers share samples: for a preset whose strategy the file
    leaves open."""
    open_ = text_of(get(train, "strategy")) in (None, "auto") and get(train, "mesh") is None
    return open_ and get(train, "model", "preset") is not None


def figures_of(train: Node) -> dict[str, int]:
    """Of the model, as far as the file says them itself or by a preset; the vocabulary may be the data's."""
    model, preset = get(train, "model"), get(train, "model", "preset")
    shape = PRESETS.get(preset.value) if preset is not None and isinstance(preset.value, str) else None
    figures: dict[str, Any] = {}
    if shape is not None:
        names = ("dim", "num_heads", "num_kv_heads", "ffn_dim", "num_layers")
        figures = {name: getattr(shape, name) for name in names} | {
            "num_experts": getattr(shape, "num_experts", 0)
        }
    if model is not None and isinstance(model.value, dict):
        figures |= {key: node.value for key, node in model.value.items()}
    return {key: value for key, value in figures.items() if type(value) is int and value >= 0}
