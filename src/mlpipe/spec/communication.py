"""Rules of `train.communication` and `train.stragglers`, as far as the file alone shows them; which axes they
do not go with stands in `_core/meshes.py`."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe._core.meshes import UNEVEN
from mlpipe.spec import mesh
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, text_of

_INSTEAD = "write communication: resident"


def problems(stage: Node, with_shards: tuple[str, ...], within_nodes: tuple[str, ...]) -> Iterator[Problem]:
    """Of a stage that trains. `with_shards`: strategies under which each worker owns a part of weights;
    `within_nodes`: those under which each node has all of them."""
    yield from _of_moved_load(stage)
    asked = get(stage, "train", "communication")
    name = text_of(asked) if asked is not None else None
    if asked is None or name not in UNEVEN:
        return
    if (update := get(stage, "train", "update")) is not None and update.value is not None:
        yield Problem.at(
            update.place,
            f"update is for workers that agree now and then, and {name} for those that do at each step",
            "remove one of them",
        )
    if name == "resident":
        return
    yield from _apart(stage, asked, with_shards, within_nodes)
    deterministic = get(stage, "train", "deterministic")
    if deterministic is not None and deterministic.value is True:
        yield Problem.at(
            deterministic.place,
            "on_demand adds gradients in the order in which they come, which is another one each time",
            f"remove it, or {_INSTEAD}",
        )


def _apart(
    stage: Node, asked: Node, with_shards: tuple[str, ...], within_nodes: tuple[str, ...]
) -> Iterator[Problem]:
    """Workers that need a part of the weights, and are on another node than its owner; or nobody owns one."""
    counts = (get(stage, "resources", key) for key in ("nodes", "gpus_per_node", "workers_per_node"))
    nodes, gpus, workers = (one.value if one is not None and type(one.value) is int else 0 for one in counts)
    nodes, each = max(1, nodes), gpus or max(1, workers)
    fitting = within_nodes if nodes > 1 else (*within_nodes, *with_shards)
    strategy = get(stage, "train", "strategy")
    name = (text_of(strategy) if strategy is not None else None) or "auto"
    if name not in ("auto", *with_shards, *within_nodes):
        yield Problem.at(
            asked.place,
            f"on_demand reads weights from workers that each own a part; under {name} they do not",
            f"write strategy: {fitting[-1]}, or {_INSTEAD[6:]}",
        )
        return
    beside = "on_demand reads the memory of workers beside it, of one node"
    where, sizes = get(stage, "train", "mesh"), mesh.sizes_of(stage.value["train"], nodes * each)
    if nodes > 1 and each == 1:
        words = f"{beside}, and each of these has one worker"
        number = get(stage, "resources", "workers_per_node") or get(stage, "resources", "nodes")
        assert number is not None  # else there was one node
        yield Problem.at(number.place, words, "write workers_per_node: 2 or more, or " + _INSTEAD[6:])
    elif where is not None and isinstance(sizes, dict):
        shards = sizes["dp_shard"]
        if nodes * each > 1 and (shards == 1 or each % shards):
            words = f"{beside}, and dp_shard is {shards} where a node has {each} workers"
            if shards == 1:
                words = "on_demand reads weights from workers that each own a part, and dp_shard is 1"
            node = get(where, "dp_shard") or where
            fitting_mesh = f"mesh: {{dp_replicate: fill, dp_shard: {each}}}"
            yield Problem.at(node.place, words, f"write {fitting_mesh}, or {_INSTEAD[6:]}")
    elif strategy is not None and nodes > 1 and name in with_shards:
        words = f"{beside}, and {name} splits weights over {nodes} nodes"
        yield Problem.at(strategy.place, words, f"write strategy: {fitting[-1]}, or {_INSTEAD[6:]}")


def _of_moved_load(stage: Node) -> Iterator[Problem]:
    asked = get(stage, "train", "stragglers")
    if asked is None or text_of(asked) != "move_load":
        return
    for keys, fine, why, hint in (
        (
            ("communication",),
            ("auto", "resident", "on_demand"),
            "workers that wait for each other in each micro-batch have equally many",
            _INSTEAD,
        ),
        (
            ("deterministic",),
            (False,),
            "who computes what, and in which order sums add up, is up to clocks",
            "remove it",
        ),
        (("update",), (None,), "an island does not wait for the others", "remove one of them"),
        (
            ("data", "workers"),
            (0,),
            "what is read ahead is of a share of the samples that may change",
            "write workers: 0",
        ),
        (("data", "splits"), (1,), "each worker has its own parts of a stream", "use a data set with [i]"),
    ):
        other = get(stage, "train", *keys)
        if other is not None and other.value not in fine:
            message = f"{'.'.join(keys)} does not go with stragglers: move_load: {why}"
            yield Problem.at(other.place, message, hint)
