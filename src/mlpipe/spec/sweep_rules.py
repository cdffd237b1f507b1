"""What a `sweep` and the rest of its file must agree in. Every value that is listed is put into the file and
checked there, one after the other; whole trials are, before the first one starts (`submit/sweeps`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

from mlpipe._core.gate import BUILT_IN, METRICS, is_of
from mlpipe.spec import overrides
from mlpipe.spec.part import kind_of, spec_part
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.sweep import MAX_TRIALS, Choices, Interval, Sweep, candidates
from mlpipe.spec.tree import Node, get, problem_of_key, text_of
from mlpipe.spec.trials import planned
from mlpipe.spec.validation import metric_names

Check = Callable[[Node], list[Problem]]
_FIXED = ("name", "needs")  # of a stage: what makes it another pipeline
_OF_STEPS = "loss"  # the metric that every training has


def check(root: Node, problems_of: Check) -> Iterator[Problem]:
    """Of a file that is sound but for its sweep. `problems_of`: what is wrong with a file without one."""
    sweep = root.value["sweep"]
    over = sweep.value["over"]
    yield from _repeats(root)
    keys: dict[str, Node] = {}
    axes: list[Choices | Interval] = []
    for written, node in over.value.items():
        place = node.key or node.place
        key = full_key(root, written)
        if isinstance(key, Problem):
            yield key
        elif key in keys:
            yield Problem.at(place, f"a second list for {key}", "keep one of the two")
        else:
            keys[key] = node
            axes.append(candidates(node.plain()))
            yield from _values(root, key, node, problems_of)
    if len(keys) == len(over.value):
        yield from _number(sweep, list(keys.values()), axes)
    yield from _metric(root, sweep)
    yield from _asha(root, sweep)


def check_trials(root: Node, sweep: Sweep, problems_of: Check) -> Iterator[Problem]:
    """Of a file in which `check` found nothing, and whose keys are written out: values that are right by
    themselves and wrong together. Each mistake once, of the first trial that makes it."""
    over = root.value["sweep"].value["over"]
    seen = set[str]()
    for number, values in enumerate(planned(sweep)):
        trial = _without_sweep(root)
        for key, value in values.items():
            node = _written(over.value[key], value)
            overrides.put(trial, key, node, node.place)
        for problem in problems_of(trial):
            if str(problem) not in seen:
                seen.add(str(problem))
                words = ", ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
                yield problem._replace(message=f"{problem.message} (trial {number:03d}: {words})")


def _written(node: Node, value: Any) -> Node:
    """A value of an axis, where it is written."""
    if isinstance(node.value, list):
        written = next(item for item in node.value if json.dumps(item.plain()) == json.dumps(value))
        return Node(written.value, written.place, node.key, text=written.text)
    return Node(value, node.place, node.key)


def write_keys_out(root: Node) -> None:
    """Keys of `over` as `--set` takes them, of a file in which `check` found nothing."""
    over = root.value["sweep"].value["over"]
    over.value = {str(full_key(root, written)): node for written, node in over.value.items()}


def full_key(root: Node, written: str) -> str | Problem:
    """A key of `over` as `stages.NAME...`. Of the only training its stage may be left out."""
    node = root.value["sweep"].value["over"].value[written]
    place = node.key or node.place
    named = overrides.stage(root, written.removeprefix("stages."))
    trainings = _trainings(root)
    if named is None and not written.startswith("stages.") and len(trainings) == 1:
        kind = kind_of(trainings[0])
        assert kind is not None
        rest = written.removeprefix(f"{kind.name}.")
        if rest.partition(".")[0] in spec_part(kind).keys:
            return f"stages.{text_of(trainings[0].value['name'])}.{kind.name}.{rest}"
    if named is None:
        known = [name for stage in overrides.stages(root) if (name := text_of(stage.value.get("name")))]
        if len(trainings) == 1 and (kind := kind_of(trainings[0])) is not None:
            known += spec_part(kind).keys
        word = written.removeprefix("stages.").partition(".")[0]
        hint = closest(word, known)
        if len(trainings) > 1:
            hint += "; there are several trainings: begin with the stage's name"
        return Problem.at(place, f"{written!r} is no key of a stage", hint)
    stage, rest = named
    head, kind = rest.partition(".")[0], kind_of(stage)
    if head in ("", *_FIXED):
        return Problem.at(place, f"{written!r} makes another pipeline of it", "vary keys of its work")
    if kind is not None and head != kind.name and head in spec_part(kind).keys:
        rest = f"{kind.name}.{rest}"
    return f"stages.{text_of(stage.value['name'])}.{rest}"


def _trainings(root: Node) -> list[Node]:
    stages = overrides.stages(root)
    return [stage for stage in stages if (kind := kind_of(stage)) is not None and kind.is_training]


def _values(root: Node, key: str, node: Node, problems_of: Check) -> Iterator[Problem]:
    """Each value in the file, at its own place; of an interval both ends."""
    place = node.key or node.place
    if isinstance(node.value, list):
        nodes = node.value
    else:
        spread = candidates(node.plain())
        ends = (
            [spread.low, spread.high]
            if isinstance(spread, Interval)
            else [spread.values[0], spread.values[-1]]
        )
        nodes = [Node(end, node.place, key=place) for end in dict.fromkeys(ends)]  # 2..2 has one
    seen, written = set[str](), list[str]()
    for value in nodes:
        if (text := json.dumps(value.plain())) in written:
            yield Problem.at(value.place, f"{text} is there already", "remove it")
        written.append(text)
        trial = _without_sweep(root)
        put = Node(value.value, value.place, key=place, text=value.text)
        for problem in overrides.put(trial, key, put, place) or problems_of(trial):
            if str(problem) not in seen:
                seen.add(str(problem))
                yield problem


def _without_sweep(root: Node) -> Node:
    """A copy to put values into; leaves are shared."""
    copy = _copy(root)
    del copy.value["sweep"]
    return copy


def _copy(node: Node) -> Node:
    if isinstance(node.value, dict):
        return Node({key: _copy(child) for key, child in node.value.items()}, node.place, node.key)
    if isinstance(node.value, list):
        return Node([_copy(child) for child in node.value], node.place, node.key)
    return Node(node.value, node.place, node.key, node.broken, node.text)


def _number(sweep: Node, nodes: list[Node], axes: list[Choices | Interval]) -> Iterator[Problem]:
    """How many trials there are, and whether the method can make them."""
    trials = get(sweep, "trials")
    choices = [axis for axis in axes if isinstance(axis, Choices)]
    combinations = prod(len(axis.values) for axis in choices)
    if (text_of(get(sweep, "method")) or "grid") == "grid":
        for node, axis in zip(nodes, axes, strict=True):
            if isinstance(axis, Interval):
                yield Problem.at(
                    node.place, "a grid takes every value, and an interval has no list of them",
                    "write a list or a range like 0..3, or method: random",
                )  # fmt: skip
        if trials is not None:
            yield problem_of_key(
                trials, f"a grid has as many trials as combinations, here {combinations}", "remove it"
            )
        if len(choices) == len(axes) and combinations > MAX_TRIALS:
            yield problem_of_key(
                sweep.value["over"],
                f"{combinations} combinations, and a sweep has {MAX_TRIALS} trials at most",
                "write fewer values, or method: random with trials: 50",
            )
    elif trials is None:
        yield problem_of_key(sweep, "how many trials is not said", "add 'trials: 20'")
    elif len(choices) == len(axes) and trials.value > combinations:
        yield Problem.at(
            trials.place, f"{trials.value} trials, and there are {combinations} combinations",
            "write fewer, or method: grid without trials",
        )  # fmt: skip


def _metric(root: Node, sweep: Node) -> Iterator[Problem]:
    """Something must measure it."""
    node = get(sweep, "metric", "name")
    name, where = text_of(node) or "val_loss", node or sweep
    if name == _OF_STEPS and not _trainings(root):
        yield problem_of_key(where, "no stage trains, so there is no loss", "add a train stage")
    measured = [*_evaluated(root), *(one for stage in _trainings(root) for one in _validated(stage))]
    if name == _OF_STEPS or any(_means(name, one) for one in measured):
        if name.removeprefix("val_") not in BUILT_IN and get(sweep, "metric", "mode") is None:
            yield problem_of_key(
                where,
                f"nobody knows whether more or less {name!r} is better",
                "add 'mode: max' or 'mode: min'",
            )
        return
    if measured:
        hint = closest(name, [_OF_STEPS, *(one if one in METRICS else f"val_{one}" for one in measured)])
    else:
        hint = "add an evaluate stage, or write metric: {name: loss}"
    yield problem_of_key(where, f"nothing measures {name!r}", hint)


def _means(name: str, measured: str) -> bool:
    return is_of(name.removeprefix("val_"), measured.removeprefix("val_"))


def _evaluated(root: Node) -> Iterator[str]:
    """What evaluate stages measure."""
    for stage in overrides.stages(root):
        kind = kind_of(stage)
        if kind is not None and kind.is_evaluation:
            yield from (*METRICS, *metric_names(stage.value[kind.name]))


def _validated(training: Node) -> list[str]:
    """What is measured while it trains."""
    kind = kind_of(training)
    validate = get(training, kind.name, "validate") if kind is not None else None
    return [] if validate is None else metric_names(validate) or [_OF_STEPS]


def _asha(root: Node, sweep: Node) -> Iterator[Problem]:
    """Its keys, and what it needs of the pipeline."""
    if text_of(get(sweep, "method")) != "asha":
        for key in ("eta", "min_steps"):
            if (node := get(sweep, key)) is not None:
                yield problem_of_key(node, f"only method asha has {key}", "remove it, or write method: asha")
        return
    trainings = _trainings(root)
    method = sweep.value["method"]
    if len(trainings) != 1:
        yield Problem.at(
            method.place,
            f"asha judges one training, and the pipeline has {len(trainings)}",
            "write method: random",
        )
        return
    kind = kind_of(trainings[0])
    assert kind is not None
    name = text_of(get(sweep, "metric", "name")) or "val_loss"
    if name != _OF_STEPS and not any(_means(name, one) for one in _validated(trainings[0])):
        yield Problem.at(
            method.place,
            "asha needs a metric that is measured while it trains",
            "write metric: {name: loss}, or let the training validate",
        )
    steps, first = get(trainings[0], kind.name, "steps"), get(sweep, "min_steps")
    if steps is not None and first is not None and first.value >= steps.value:
        yield Problem.at(
            first.place, f"the first rung {first.value} is not below the {steps.value} steps", "write less"
        )


def _repeats(root: Node) -> Iterator[Problem]:
    """What every trial would do again to what they share."""
    for stage in overrides.stages(root):
        kind = kind_of(stage)
        if kind is not None and kind.is_promotion:
            yield problem_of_key(
                stage.value[kind.name],
                "every trial would do this",
                "remove the stage, and write sweep: {promote: {as: NAME}} for the best one",
            )
