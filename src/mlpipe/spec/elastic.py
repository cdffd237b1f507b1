"""Rules of an elastic training: what cannot come and go while the others go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of


def problems(stage: Node) -> Iterator[Problem]:
    """Of a range in `resources.nodes`."""
    nodes = get(stage, "resources", "nodes")
    limits = re.fullmatch(r"0*([1-9]\d{0,4})\.\.0*([1-9]\d{0,4})", text_of(nodes) or "")
    if nodes is None or limits is None:
        return
    fewest, most = map(int, limits.groups())
    train = get(stage, "train")
    if train is None or not isinstance(train.value, dict):
        yield problem_of_key(nodes, "only a training is elastic", f"write a number, like {fewest}")
        return
    if fewest >= most:
        hint = f"write {most}..{fewest}" if most < fewest else f"write {fewest}"
        yield problem_of_key(nodes, f"{nodes.value!r} is no range", hint)
        return
    yield from _impossible(train)
    batch, workers = _number(train, "data", "batch_size"), _number(stage, "resources", "gpus_per_node")
    workers = workers or _number(stage, "resources", "workers_per_node") or 1
    if batch and batch < most * workers:
        yield problem_of_key(
            nodes,
            f"{most} nodes of {workers} workers share batch_size {batch}: some would have no sample",
            f"write at most {max(fewest, batch // workers)} nodes, or a larger batch",
        )


def _impossible(train: Node) -> Iterator[Problem]:
    pp = get(train, "mesh", "pp")
    if pp is not None and pp.value != 1:
        yield problem_of_key(pp, "nodes that come and go hold whole models, and pp cuts them", "make pp 1")
    preset = get(train, "model", "preset")
    if (text_of(preset) or "").startswith("moe-") and preset is not None:
        yield problem_of_key(
            preset,
            "experts are balanced by the loads of all workers, which come and go",
            "write one number of nodes",
        )
    for key in ("compress", "update"):
        slow = get(train, key)
        if slow is not None and slow.value is not None:
            yield problem_of_key(
                slow, f"{key} keeps what only one replica has, and replicas come and go", f"remove {key}"
            )
    asked = get(train, "communication")
    if asked is not None and text_of(asked) == "on_demand":
        yield Problem.at(
            asked.place,
            "on_demand is for workers that stay: nobody has tried it with nodes that come and go",
            "write communication: resident, or one number of nodes",
        )
    reading = get(train, "data", "workers")
    if reading is not None and reading.value != 0:
        yield problem_of_key(
            reading, "what is read ahead is of a share of the samples that may change", "make data.workers 0"
        )
    splits = get(train, "data", "splits")
    if splits is not None and splits.value != 1:
        yield problem_of_key(
            splits,
            "a stream cannot be dealt to nodes that come and go",
            "use a data set with [i], or one number of nodes",
        )


def _number(node: Node, *path: str) -> int | None:
    found: Any = get(node, *path)
    return found.value if found is not None and type(found.value) is int and found.value > 0 else None
