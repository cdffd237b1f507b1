"""Rules of `train.communication` and `train.stragglers`, as far as the file alone shows them; which axes they
do not go with stands in `_core/meshes.py`."""

from __future__ import annotations

from collections.abc import Iterator

from mlpipe._core.meshes import UNEVEN
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, text_of

_INSTEAD = "write communication: resident"


def problems(stage: Node, with_shards: tuple[str, ...]) -> Iterator[Problem]:
    """Of a stage that trains. `with_shards`: strategies under which each worker owns a part of weights."""
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
    strategy = get(stage, "train", "strategy")
    name = text_of(strategy) if strategy is not None else None
    if name is not None and name not in ("auto", *with_shards):
        yield Problem.at(
            asked.place,
            f"on_demand reads weights from workers that each own a part; under {name} they do not",
            f"write strategy: {with_shards[-1]}, or {_INSTEAD[6:]}",
        )
    for keys, most, why in (
        (("resources", "nodes"), 1, "on_demand reads the memory of workers beside it, of one node"),
        (("resources", "gpus_per_node"), 0, "on_demand is for workers on CPUs; nobody has tried it on GPUs"),
    ):
        number = get(stage, *keys)
        if number is not None and type(number.value) is int and number.value > most:
            yield Problem.at(number.place, f"{why}, and there are {keys[1]}: {number.value}", _INSTEAD)
    deterministic = get(stage, "train", "deterministic")
    if deterministic is not None and deterministic.value is True:
        yield Problem.at(
            deterministic.place,
            "on_demand adds gradients in the order in which they come, which is another one each time",
            f"remove it, or {_INSTEAD}",
        )


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
