"""What concerns several fields or stages at once. Reads the raw tree, so that these mistakes are reported
beside those of types: whatever has the wrong shape here is somebody else's problem and is skipped. What only
stages of one kind can get wrong, that kind says (`kinds/<kind>/spec.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mlpipe.kinds import KINDS, Kind
from mlpipe.spec import fields, placeholders
from mlpipe.spec.graph import Graph
from mlpipe.spec.part import kind_of, spec_part
from mlpipe.spec.problems import Problem, closest
from mlpipe.spec.tree import Node, each_alone, get, items_of, problem_of_key, text_of

# Of variables in `env`; compiled for files that have some.
_SECRET = r"(?i)SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_?KEY|ACCESS_KEY|(^|_)TOKEN$"
OF_GPUS = ("gpus_per_node", "gpu", "slice", "gpu_sharing")
_TAKEN = (
    r"MLPIPE_.*|TORCHELASTIC_.*|PET_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
)


def is_taken(name: str) -> bool:
    """Whether it is a variable that torchrun and mlpipe set."""
    return re.fullmatch(_TAKEN, name) is not None


def check(root: Node) -> list[Problem]:
    """Every violated rule of the file."""
    stages = [stage for stage in items_of(root, "stages") if isinstance(stage.value, dict)]
    problems: list[Problem] = []
    problems += _duplicates(stages)
    graph = Graph(stages)
    problems += graph.problems()
    for stage in stages:
        problems += _kinds(stage)
        for one in each_alone(stage):
            problems += _resources(one)
        problems += _env(stage)
        if (resources := get(stage, "resources")) is not None and isinstance(resources.value, list):
            from mlpipe.spec import groups  # of few files

            problems += groups.problems(stage)
        nodes = get(stage, "resources", "nodes")
        if nodes is not None and fields.is_range(nodes.value):
            from mlpipe.spec import elastic  # of few files

            problems += elastic.problems(stage)
        for kind in KINDS.values():
            if kind.name in stage.value:
                problems += spec_part(kind).problems(stage)
        problems += _references(stage, graph)
        problems += _placeholders(stage, graph)
    alone = [one for stage in stages for one in each_alone(stage)]
    if any(get(one, "resources", key) for one in alone for key in OF_GPUS):
        from mlpipe.spec import gpu_rules  # of few files

        problems += gpu_rules.check(alone)
    return problems


def _duplicates(stages: list[Node]) -> Iterator[Problem]:
    seen: dict[str, Node] = {}
    for stage in stages:
        node = get(stage, "name")
        name = text_of(node)
        if node is None or name is None:
            continue
        if name in seen:
            yield Problem.at(
                node.place,
                f"a second stage named {name!r}, first at {seen[name].place}",
                "rename one of the two",
            )
        else:
            seen[name] = node


def _kinds(stage: Node) -> Iterator[Problem]:
    names = [name for name in KINDS if name in stage.value]
    choices = f"write exactly one of {', '.join(KINDS)}"
    if not names:
        yield Problem.at(stage.place, "the stage does nothing", choices)
    for name in names[1:]:
        yield problem_of_key(
            stage.value[name], f"the stage is {names[0]!r} already, so {name!r} is too much", choices
        )


def _resources(stage: Node) -> Iterator[Problem]:
    resources = get(stage, "resources")
    if resources is None:
        return
    gpus, workers = get(resources, "gpus_per_node"), get(resources, "workers_per_node")
    num_gpus = gpus.value if gpus is not None and isinstance(gpus.value, int) else 0
    if gpus is not None and num_gpus > 0:
        if get(resources, "gpu") is None:
            yield problem_of_key(
                gpus, "GPUs without a model: memory and peak are unknown", "add 'gpu: H100-80GB' or the like"
            )
        if workers is not None and workers.value != num_gpus:
            yield problem_of_key(workers, "a worker drives exactly one GPU", "remove workers_per_node")
    preflight = get(resources, "preflight")
    ranks = any(kind.runs == "workers" for name, kind in KINDS.items() if name in stage.value)
    if preflight is not None and not ranks:
        yield problem_of_key(preflight, "a preflight is for stages that run as ranks", "remove it")
    spares, nodes = get(resources, "spares"), get(resources, "nodes")
    if spares is not None:
        if preflight is None or text_of(preflight) == "off":
            hint = "add 'preflight: auto'"
            yield problem_of_key(spares, "it is the preflight that chooses among spares", hint)
        elif nodes is None or nodes.value == 1:
            yield problem_of_key(spares, "a gang has spares, and this is one node", "remove it")
    device = get(resources, "device")
    if device is not None and num_gpus == 0:
        yield problem_of_key(
            device, "device describes a GPU, and there is none", "remove it, or set gpus_per_node"
        )


def _env(stage: Node) -> Iterator[Problem]:
    env = get(stage, "env")
    if env is None or not isinstance(env.value, dict):
        return
    for name, node in env.value.items():
        if is_taken(name):
            yield problem_of_key(node, f"{name} is set by torchrun and mlpipe", "remove it")
        elif re.search(_SECRET, name):
            yield problem_of_key(
                node,
                f"{name} looks like a secret, and a pipeline file is stored and shown",
                "export it where the stage runs instead",
            )


def _references(stage: Node, graph: Graph) -> Iterator[Problem]:
    """Keys like `evaluate.train` name one stage among the needs."""
    name, kind = text_of(get(stage, "name")), kind_of(stage)
    if kind is None or name is None or not isinstance(stage.value[kind.name].value, dict):
        return
    before = graph.before(name)
    for reference in spec_part(kind).references:
        key = reference.kind
        there = graph.of_kind(key, before)
        node = get(stage, kind.name, key)
        if node is not None and isinstance(node.value, str):
            if node.value not in there:
                yield problem_of_key(
                    node, f"{node.value!r} is no {key} stage that {name!r} needs", closest(node.value, there)
                )
        elif node is None and len(there) > 1:
            yield problem_of_key(
                stage.value[kind.name],
                f"{name!r} needs several {key} stages: {', '.join(there)}",
                f"say which with '{key}: {there[0]}'",
            )
        elif node is None and not there and reference.required:
            every = graph.of_kind(key, set(graph.stages))
            hint = f"add 'needs: [{every[0]}]'" if every else f"add a {key} stage"
            yield problem_of_key(stage.value[kind.name], f"{name!r} needs no {key} stage", hint)


def _placeholders(stage: Node, graph: Graph) -> Iterator[Problem]:
    kind = kind_of(stage)
    before = graph.before(text_of(get(stage, "name")) or "")
    leaves = [spec_part(each).texts(stage.value[name]) for name, each in KINDS.items() if name in stage.value]
    env = get(stage, "env")
    if env is not None:
        leaves.append(leaf for _, leaf in env.walk())
    for leaf in (leaf for some in leaves for leaf in some):
        if not isinstance(leaf.value, str) or leaf.broken:
            continue
        for placeholder in placeholders.names(leaf.value):
            problem = _placeholder(placeholder, kind, before, graph)
            if problem is not None:
                yield Problem.at(leaf.place, *problem)


def _placeholder(name: str, kind: Kind | None, before: set[str], graph: Graph) -> tuple[str, str] | None:
    if name == "":
        return "a placeholder '{{' without its '}}'", "close it, or write '{{{{' for two literal braces"
    if name == "output":
        if kind is not None and kind.has_output:
            return None
        return "{{output}} is the folder of a command stage", "write {{stages.NAME.output}}"
    if name in placeholders.FIXED:
        return None
    stage = placeholders.stage_of(name)
    if stage in before and stage in graph.stages:
        kind = kind_of(graph.stages[stage])
        if kind is None or kind.has_output:  # of one that does nothing that is told
            return None
    makers = [each for each in sorted(before) if each in graph.stages and _has_output(graph.stages[each])]
    if stage is None:
        known = [*placeholders.FIXED, *(f"stages.{maker}.output" for maker in makers)]
        return f"unknown placeholder {{{{{name}}}}}", closest(name, known)
    if stage not in graph.stages:
        return f"placeholder to an unknown stage {stage!r}", closest(stage, makers)
    if stage not in before:
        return f"{{{{{name}}}}} of a stage that is not needed", f"add {stage!r} to needs"
    return f"{{{{{name}}}}}: only command stages have an output folder", closest(stage, makers)


def _has_output(stage: Node) -> bool:
    kind = kind_of(stage)
    return kind is not None and kind.has_output


def values_at(root: Node, path: Sequence[Any]) -> tuple[Node, bool]:
    """The deepest node along a pydantic location, and whether its last part was found there."""
    node, exists = root, True
    for part in path:
        child = None
        if isinstance(node.value, dict):
            child = node.value.get(part)
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
        exists = child is not None
        node = child or node
    return node, exists
