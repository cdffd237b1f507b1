"""Trainings that no hardware can do, as far as the file alone shows it: shapes that make no model, batches
and meshes that do not come out even. What needs the presets' own numbers is the planner's."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node


def problems(stage: Node) -> Iterator[Problem]:
    model = _get(stage, "train", "model")
    if model is not None:
        yield from _shape(model)
    yield from _even(stage)


def _shape(model: Node) -> Iterator[Problem]:
    dim, heads, kv_heads = (_number(model, key) for key in ("dim", "num_heads", "num_kv_heads"))
    if dim is not None and heads is not None and dim.value % heads.value:
        yield Problem.at(
            heads.place,
            f"num_heads {heads.value} does not divide dim {dim.value}",
            f"write {_nearest_divisor(dim.value, heads.value)}",
        )
    if heads is not None and kv_heads is not None and heads.value % kv_heads.value:
        yield Problem.at(
            kv_heads.place,
            f"num_kv_heads {kv_heads.value} does not divide num_heads {heads.value}",
            f"write {_nearest_divisor(heads.value, kv_heads.value)}",
        )
    seq_len, longest = _number(model, "seq_len"), _number(model, "max_seq_len")
    if seq_len is not None and longest is not None and seq_len.value > longest.value:
        yield Problem.at(
            seq_len.place,
            f"seq_len {seq_len.value} is more than the {longest.value} positions of the model",
            f"write {longest.value} at most, or raise max_seq_len",
        )


def _even(stage: Node) -> Iterator[Problem]:
    resources, data, mesh = (
        _get(stage, *path) for path in (("resources",), ("train", "data"), ("train", "mesh"))
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


def _get(node: Node, *path: str) -> Node | None:
    for key in path:
        if not isinstance(node.value, dict) or key not in node.value:
            return None
        node = node.value[key]
    return node


def _number(node: Node, key: str) -> Node | None:
    """A whole number above 0; what else stands there is a mistake of type, and reported as that."""
    found = _get(node, key)
    good = found is not None and type(found.value) is int and found.value > 0
    return found if good else None
