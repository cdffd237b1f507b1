"""Rules of `resources` that list groups of machines: what machines of several classes cannot do together."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from mlpipe._core.gpus import gpu_classes
from mlpipe._core.meshes import across_classes
from mlpipe.spec.fields import is_range
from mlpipe.spec.mesh import sizes_of
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, groups_of, problem_of_key, text_of

_ONE = "write one mapping in resources"
_COUNTS = ("gpus_per_node", "workers_per_node")
# Of a group: what only machines that are alike can have.
_ALIKE = {
    "preflight": "it compares machines with each other, and groups differ",
    "spares": "a spare machine has the ranks of one that is like it",
    "slice": "slices have no links to each other",
    "gpu_sharing": "each step waits for the GPU that others use",
}
# Of the training: what workers with unequal shares cannot do, but for these values.
_UNEQUAL = {
    "communication": (
        ("auto", "resident"),
        "workers with unequal shares meet once a step, over a network",
        "write communication: resident",
    ),
    "update": ((), "an island does not wait for the others", "remove one of them"),
    "accumulation": (("auto",), "each group has as many micro-batches as its share makes", "remove it"),
    "pipeline.microbatches": (
        ("auto",),
        "each group has as many micro-batches as its share makes",
        "remove it",
    ),
}


def problems(stage: Node) -> Iterator[Problem]:
    """Of a stage whose `resources` are a list."""
    resources, groups = get(stage, "resources"), groups_of(stage)
    assert resources is not None
    train = get(stage, "train")
    if train is None or not isinstance(train.value, dict):
        yield problem_of_key(resources, "only a training has groups of machines", _ONE)
        return
    if len(resources.value) == 1:
        yield Problem.at(resources.place, "one group is all there is", "write it without the list")
    for group in groups:
        nodes = get(group, "nodes")
        if nodes is not None and is_range(nodes.value):
            yield Problem.at(nodes.place, "the machines of a group do not come and go", "write a number")
        for key, why in _ALIKE.items():
            node = get(group, key)
            if node is not None and text_of(node) != "off":
                yield problem_of_key(node, f"{key} does not go with groups of machines: {why}", "remove it")
    yield from _equal(groups)
    yield from _speeds(groups)
    for key, (fine, why, hint) in _UNEQUAL.items():
        node = get(train, *key.split("."))
        if node is not None and node.value not in fine:
            yield problem_of_key(node, f"{key} does not go with groups of machines: {why}", hint)
    yield from _mesh(train, groups)
    splits = get(train, "data", "splits")
    if splits is not None and splits.value != 1:
        yield problem_of_key(splits, "a stream cannot be dealt to groups of machines", _ONE)


def _mesh(train: Node, groups: list[Node]) -> Iterator[Problem]:
    mesh, nodes, each = get(train, "mesh"), [], 1
    for group in groups:
        number = get(group, "nodes")
        nodes.append(number.value if number is not None and type(number.value) is int else 1)
        counts = [one.value for key in _COUNTS if (one := get(group, key)) is not None]
        each = next((count for count in counts if type(count) is int and count > 0), 1)
    sizes = sizes_of(train, sum(nodes) * each)
    if mesh is None or not isinstance(sizes, dict) or min(nodes) < 1:
        return
    for axis, conflict in across_classes(sizes, nodes, each):
        yield Problem.at((get(mesh, axis) or mesh).place, conflict.message, conflict.remedy)
    if sizes["ep"] > 1 and (get(train, "data", "chat") or get(train, "data", "packing")):
        words = "ep over groups of machines: packed rows of samples that differ in length cannot be dealt so"
        yield Problem.at((get(mesh, "ep") or mesh).place, words, "make ep 1, or " + _ONE)


def _equal(groups: list[Node]) -> Iterator[Problem]:
    """All nodes of a gang start equally many workers, by one image's collectives."""
    for key in _COUNTS[: 1 if any(get(one, _COUNTS[0]) for one in groups) else 2]:
        default = 0 if key == "gpus_per_node" else 1
        counts = [default if (node := get(one, key)) is None else node.value for one in groups]
        for group, count in zip(groups[1:], counts[1:], strict=True):
            if count != counts[0]:
                node = get(group, key)
                words = (
                    f"{key} {count}, and the first group has {counts[0]}: a gang's nodes have equally many"
                )
                where = node.place if node is not None else group.place
                yield Problem.at(
                    where, words, f"write {key}: {counts[0]}, and more nodes for what is left over"
                )
    known = [(one, gpu_classes().get(text_of(get(one, "gpu")) or "")) for one in groups]
    for (_, first), (group, other) in combinations(known, 2):
        gpu = get(group, "gpu")
        if first is not None and other is not None and gpu is not None and first.vendor != other.vendor:
            words = f"{first.name} and {other.name} are of vendors whose collectives do not meet"
            yield Problem.at(gpu.place, words, "train on GPUs of one vendor")
            return


def _speeds(groups: list[Node]) -> Iterator[Problem]:
    said = [one for one in groups if get(one, "speed") is not None]
    if said and len(said) < len(groups):
        missing = next(one for one in groups if get(one, "speed") is None)
        yield Problem.at(
            missing.place,
            "speeds are beside each other, and this group says none",
            "add 'speed: ...' to each group, or to none",
        )
