"""Rules of an elastic training: what cannot come and go while the others go on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlpipe._core.feasibility import ELASTIC_EXPERTS
from mlpipe._core.meshes import UNEVEN
from mlpipe.spec import fields as f
from mlpipe.spec.feasibility import batch_of
from mlpipe.spec.links import is_stale
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, problem_of_key, text_of


def problems(stage: Node) -> Iterator[Problem]:
    """Of a range in `resources.nodes`."""
    nodes = get(stage, "resources", "nodes")
    limits = f.limits_of(text_of(nodes) or "")
    if nodes is None or limits is None:
        return
    fewest, most = limits
    train = get(stage, "train")
    if train is None or not isinstance(train.value, dict):
        yield problem_of_key(nodes, "only a training is elastic", f"write a number, like {fewest}")
        return
    if fewest >= most:
        hint = f"write {most}..{fewest}" if most < fewest else f"write {fewest}"
        yield problem_of_key(nodes, f"{nodes.value!r} is no range", hint)
        return
    yield from _impossible(train)
    if (preflight := get(stage, "resources", "preflight")) is not None and text_of(preflight) != "off":
        yield problem_of_key(preflight, "machines that come and go are not checked", "remove it")
    written, workers = batch_of(train), _number(stage, "resources", "gpus_per_node")
    workers = workers or _number(stage, "resources", "workers_per_node") or 1
    compress = get(train, "compress")
    if workers > 1 and compress is not None and compress.value is not None:
        yield problem_of_key(
            compress,
            f"compress is between nodes that come and go of one worker each, and these have {workers}",
            "remove compress",
        )
    if written and (batch := written[0]) < most * workers:
        each, room = "1 worker" if workers == 1 else f"{workers} workers", batch // workers
        yield problem_of_key(
            nodes,
            f"{most} nodes of {each} share a batch of {batch}: some would have no sample",
            f"write at most {room} nodes, or a larger batch"
            if room > fewest
            else f"write a batch of {most * workers} samples at least",
        )


def _impossible(train: Node) -> Iterator[Problem]:
    for axis in ("pp", "cp", "tp", "ep"):
        size = get(train, "mesh", axis)
        if size is not None and size.value != 1:
            yield problem_of_key(
                size,
                f"nodes that come and go have the data axes alone, and {axis} is none",
                f"make {axis} 1, or write one number of nodes",
            )
    asked = get(train, "communication")
    if asked is not None and text_of(asked) in UNEVEN:
        yield problem_of_key(
            asked,
            f"nodes that come and go do not have communication: {asked.value} within",
            "write communication: collective",
        )
    stop = get(train, "validate", "stop")
    if stop is not None and stop.value is not None:
        yield problem_of_key(
            stop,
            "each node measures for itself, and may see another end than the others",
            "remove stop, or write one number of nodes",
        )
    preset = get(train, "model", "preset")
    if (text_of(preset) or "").startswith("moe-") and preset is not None:
        yield problem_of_key(preset, ELASTIC_EXPERTS.message, ELASTIC_EXPERTS.remedy)
    stragglers = get(train, "stragglers")
    if stragglers is not None and text_of(stragglers) == "move_load":
        yield problem_of_key(
            stragglers,
            "nodes that come and go have equal shares of a batch",
            "remove it, or write one number of nodes",
        )
    buckets = get(train, "buckets")
    if buckets is not None and buckets.value is not None:
        yield problem_of_key(
            buckets,
            "between nodes that come and go nothing is sent beside the backward pass",
            "remove buckets",
        )
    update, factors = get(train, "update"), get(train, "compress", "powersgd")
    if update is not None and is_stale(update):
        yield problem_of_key(
            update,
            "what travels while a node goes on is lost with any of those that told it, and they come and go",
            "write diloco or local_sgd, without staleness",
        )
    if text_of(compress := get(train, "compress")) == "powersgd" or factors is not None:
        assert compress is not None
        yield problem_of_key(
            compress, "powersgd keeps factors that all have alike, and who comes has none", "write int8"
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
    written: Any = get(node, *path)
    return written.value if written is not None and type(written.value) is int and written.value > 0 else None
