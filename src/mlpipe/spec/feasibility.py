"""Trainings that no hardware can do, as far as the file alone shows it: shapes that make no model, batches
and meshes that do not come out even. Why they cannot says `_core/feasibility.py`; here, where it is
written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mlpipe._core.feasibility import (
    Infeasible,
    indivisible,
    no_experts,
    too_few_samples,
    too_long,
    too_many_experts,
    uneven_accumulation,
    uneven_batch,
    uneven_micro_batch,
)
from mlpipe._core.presets import OF_EXPERTS, PRESETS, MoeConfig
from mlpipe.spec import mesh, pipelines
from mlpipe.spec.problems import Place, Problem
from mlpipe.spec.tree import Node, get, groups_of


def problems(stage: Node) -> Iterator[Problem]:
    """Of a stage that trains."""
    model = get(stage, "train", "model")
    if model is not None:
        yield from _shape(model)
    yield from _even(stage)


def _shape(model: Node) -> Iterator[Problem]:
    dim, heads, kv_heads, longest = (
        _Figure.of(model, key) for key in ("dim", "num_heads", "num_kv_heads", "max_seq_len")
    )
    yield from _indivisible(heads, dim)
    yield from _indivisible(kv_heads, heads)
    yield from _experts(model)
    seq_len = _number(model, "seq_len")
    if seq_len is not None and longest:
        yield from _at(seq_len.place, too_long(seq_len.value, longest.value))


def _experts(model: Node) -> Iterator[Problem]:
    preset = get(model, "preset")
    if preset is not None and isinstance(PRESETS.get(str(preset.value)), MoeConfig):
        each, number = (_Figure.of(model, key) for key in ("experts_per_token", "num_experts"))
        if each is not None and number is not None and (place := each.place or number.place):
            yield from _at(place, too_many_experts(each.value, number.value))
        return
    for key in OF_EXPERTS:
        if (node := get(model, key)) is not None and preset is not None:
            yield from _at(node.place, no_experts(key))


class _Figure(NamedTuple):
    """A number of the model's shape. `place`: where it is written; None: it is the preset's."""

    name: str
    value: int
    place: Place | None

    @staticmethod
    def of(model: Node, key: str) -> _Figure | None:
        """None: nobody says, or what is written is no number."""
        node, preset = _number(model, key), get(model, "preset")
        if node is not None:
            return _Figure(key, node.value, node.place)
        shape = PRESETS.get(preset.value) if preset is not None and isinstance(preset.value, str) else None
        return _Figure(key, getattr(shape, key), None) if shape and get(model, key) is None else None


def _indivisible(part: _Figure | None, whole: _Figure | None) -> Iterator[Problem]:
    """Where it is written: of two numbers of the file the one that should divide."""
    if part is None or whole is None:
        return
    conflict = indivisible((part.name, part.value), (whole.name, whole.value))
    if conflict is None:
        return
    if part.place is not None:
        yield from _at(part.place, conflict)
    elif whole.place is not None:
        yield Problem.at(
            whole.place,
            f"{whole.name} {whole.value} is no multiple of the preset's {part.name} {part.value}",
            f"write {max(1, round(whole.value / part.value)) * part.value}",
        )


def _even(stage: Node) -> Iterator[Problem]:
    train, groups = get(stage, "train"), groups_of(stage)
    if train is None or not isinstance(train.value, dict):
        return
    resources = get(stage, "resources")
    workers = sum(map(_num_workers, groups)) if groups else _num_workers(resources)
    yield from mesh.problems(train, workers)
    yield from pipelines.problems(train, workers)
    sizes, data, written = mesh.sizes_of(train, workers), get(train, "data"), batch_of(train)
    if resources is None or data is None or written is None or isinstance(sizes, Infeasible):
        return
    batch, unit, place = written
    readers = workers if sizes is None else sizes["dp_replicate"] * sizes["dp_shard"]
    if groups:  # whose shares are as their speeds
        if sizes is not None or not mesh.is_searched(train):
            yield from _at(place, too_few_samples(batch, readers))
        return
    if sizes is None and batch < readers and mesh.is_searched(train):
        return  # the planner may find axes whose workers share samples
    micro_batch = _number(data, "micro_batch")
    conflict = uneven_batch(batch, readers, unit)
    yield from _at(place, conflict)
    if conflict is None and micro_batch is not None:
        yield from _at(micro_batch.place, uneven_micro_batch(micro_batch.value, batch, readers))
    for parent, key in ((train, "accumulation"), (get(train, "pipeline"), "microbatches")):
        number = _number(parent, key) if parent is not None else None
        if conflict is None and number is not None and micro_batch is None:
            yield from _at(number.place, uneven_accumulation(number.value, batch, readers, key))


def batch_of(train: Node) -> tuple[int, int, Place] | None:
    """Samples of a step, how the file counts one of them (as 1, or in tokens), and where. None: the file does
    not say, or what it says is no number of samples."""
    data, model = get(train, "data"), get(train, "model")
    if data is None:
        return None
    if (size := _number(data, "batch_size")) is not None:
        return size.value, 1, size.place
    tokens = _number(data, "batch_tokens")
    seq_len = _number(model, "seq_len") if model is not None else None
    if tokens is None or seq_len is None or tokens.value % seq_len.value:
        return None
    return tokens.value // seq_len.value, seq_len.value, tokens.place


def _num_workers(resources: Node | None) -> int:
    if resources is None:
        return 1
    nodes, gpus = _number(resources, "nodes"), _number(resources, "gpus_per_node")
    per_node = gpus or _number(resources, "workers_per_node")
    return (nodes.value if nodes else 1) * (per_node.value if per_node else 1)


def _at(place: Place, conflict: Infeasible | None) -> Iterator[Problem]:
    if conflict is not None:
        yield Problem.at(place, conflict.message, conflict.remedy)


def _number(node: Node, key: str) -> Node | None:
    """A whole number above 0; what else stands there is a mistake of type, and reported as that."""
    number = get(node, key)
    good = number is not None and type(number.value) is int and number.value > 0
    return number if good else None
