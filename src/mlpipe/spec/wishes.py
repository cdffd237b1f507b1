"""Trainings that no hardware can do, as far as the file alone shows it: shapes that make no model, batches
and meshes that do not come out even."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mlpipe._core.presets import PRESETS
from mlpipe.spec.problems import Place, Problem
from mlpipe.spec.tree import Node, get


def problems(stage: Node) -> Iterator[Problem]:
    model = get(stage, "train", "model")
    if model is not None:
        yield from _shape(model)
    yield from _even(stage)


def _shape(model: Node) -> Iterator[Problem]:
    dim, heads, kv_heads, longest = (
        _Wish.of(model, key) for key in ("dim", "num_heads", "num_kv_heads", "max_seq_len")
    )
    if dim and heads and dim.value % heads.value:
        yield from _uneven(heads, "num_heads", dim, "dim")
    if heads and kv_heads and heads.value % kv_heads.value:
        yield from _uneven(kv_heads, "num_kv_heads", heads, "num_heads")
    seq_len = _number(model, "seq_len")
    if seq_len is not None and longest and seq_len.value > longest.value:
        yield Problem.at(
            seq_len.place,
            f"seq_len {seq_len.value} is more than the {longest.value} positions of the model",
            f"write {longest.value} at most, or raise max_seq_len",
        )


@dataclass(frozen=True)
class _Wish:
    """A number of the model's shape. `place`: where it is written; None: it is the preset's."""

    value: int
    place: Place | None

    @staticmethod
    def of(model: Node, key: str) -> _Wish | None:
        """None: nobody says, or what is written is no number."""
        node, preset = _number(model, key), get(model, "preset")
        if node is not None:
            return _Wish(node.value, node.place)
        shape = PRESETS.get(preset.value) if preset is not None and isinstance(preset.value, str) else None
        return _Wish(getattr(shape, key), None) if shape is not None and get(model, key) is None else None


def _uneven(part: _Wish, part_name: str, whole: _Wish, whole_name: str) -> Iterator[Problem]:
    """Where it is written: of two numbers of the file the one that should divide."""
    if part.place is not None:
        yield Problem.at(
            part.place,
            f"{part_name} {part.value} does not divide {whole_name} {whole.value}",
            f"write {_nearest_divisor(whole.value, part.value)}",
        )
    elif whole.place is not None:
        yield Problem.at(
            whole.place,
            f"{whole_name} {whole.value} is no multiple of the preset's {part_name} {part.value}",
            f"write {max(1, round(whole.value / part.value)) * part.value}",
        )


def _even(stage: Node) -> Iterator[Problem]:
    resources, data, mesh = (
        get(stage, *path) for path in (("resources",), ("train", "data"), ("train", "mesh"))
    )
    if resources is None:
        return
    nodes, gpus = _number(resources, "nodes"), _number(resources, "gpus_per_node")
    per_node = gpus or _number(resources, "workers_per_node")
    workers = (nodes.value if nodes else 1) * (per_node.value if per_node else 1)
    if mesh is not None:
        copies, shard = _number(mesh, "dp_replicate"), _number(mesh, "dp_shard")
        if copies is not None and shard is not None and copies.value * shard.value != workers:
            yield Problem.at(
                mesh.place,
                f"mesh {copies.value} x {shard.value} is for {copies.value * shard.value} workers, "
                f"but there are {workers}",
                "make dp_replicate x dp_shard the number of workers",
            )
    batch = _number(data, "batch_size") if data is not None else None
    micro = _number(data, "micro_batch") if data is not None else None
    if batch is None:
        return
    if batch.value % workers:
        even = max(1, round(batch.value / workers)) * workers
        yield Problem.at(
            batch.place,
            f"a batch of {batch.value} cannot be split evenly over {workers} workers",
            f"write {even}",
        )
    elif micro is not None and (batch.value // workers) % micro.value:
        share = batch.value // workers
        yield Problem.at(
            micro.place,
            f"micro_batch {micro.value} does not divide the {share} sequences of each of {workers} workers",
            f"write {_nearest_divisor(share, micro.value)}, or auto",
        )


def _nearest_divisor(number: int, wish: int) -> int:
    return min((n for n in range(1, min(number, 4096) + 1) if number % n == 0), key=lambda n: abs(n - wish))


def _number(node: Node, key: str) -> Node | None:
    """A whole number above 0; what else stands there is a mistake of type, and reported as that."""
    found = get(node, key)
    good = found is not None and type(found.value) is int and found.value > 0
    return found if good else None
