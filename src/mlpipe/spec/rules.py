"""What concerns several fields or stages at once. Reads the raw tree, so that these mistakes are reported
beside those of types: whatever has the wrong shape here is somebody else's problem and is skipped."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from mlpipe._core.units import parse_seconds
from mlpipe.spec import placeholders, wishes
from mlpipe.spec.model import KINDS
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get

_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|CREDENTIAL|PRIVATE_KEY|API_?KEY|ACCESS_KEY|(^|_)TOKEN$", re.IGNORECASE
)
TAKEN = re.compile(
    r"MLPIPE_.*|TORCHELASTIC_.*|PET_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|ROLE_NAME"
)

_SHORTEST_HANG_SECONDS = 1.0  # the watchdog looks twice a second


def check(root: Node) -> list[Problem]:
    """Every violated rule of the file."""
    stages = [stage for stage in _items(root, "stages") if isinstance(stage.value, dict)]
    found: list[Problem] = []
    found += _duplicates(stages)
    graph = _Graph(stages)
    found += graph.problems()
    for stage in stages:
        found += _kind(stage)
        found += _resources(stage)
        found += _env(stage)
        found += _train(stage)
        found += wishes.problems(stage)
        found += _references(stage, graph)
        found += _placeholders(stage, graph)
    return found


def closest(word: str, known: Sequence[str]) -> str:
    """`; did you mean ...` in words, or what is known."""
    import difflib  # of mistakes only

    near = difflib.get_close_matches(word.lower()[:64], known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"write one of {', '.join(known)}" if known else "there is none to name"


def text_of(node: Node | None) -> str | None:
    return str(node.value) if node is not None and isinstance(node.value, str) else None


def kind_of(stage: Node) -> str | None:
    return next((kind for kind in KINDS if isinstance(stage.value, dict) and kind in stage.value), None)


def _items(node: Node, key: str) -> list[Node]:
    found = get(node, key)
    return found.value if found is not None and isinstance(found.value, list) else []


def _problem(node: Node, message: str, hint: str) -> Problem:
    return Problem.at(node.key or node.place, message, hint)


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


class _Graph:
    """Who needs whom, by name."""

    def __init__(self, stages: list[Node]) -> None:
        self.stages = {name: stage for stage in reversed(stages) if (name := text_of(get(stage, "name")))}
        self.needs = {
            name: [node for node in _items(stage, "needs") if isinstance(node.value, str)]
            for name, stage in self.stages.items()
        }
        self._before: dict[str, set[str]] = {}

    def before(self, name: str) -> set[str]:
        """Everything that `name` needs, transitively. What an earlier stage needs is not walked again."""
        if name in self._before:
            return self._before[name]
        seen: set[str] = set()
        todo = [name]
        while todo:
            for node in self.needs.get(todo.pop(), []):
                if node.value in self._before:
                    seen |= {node.value} | self._before[node.value]
                elif node.value not in seen:
                    seen.add(node.value)
                    todo.append(node.value)
        self._before[name] = seen
        return seen

    def of_kind(self, kind: str, names: set[str]) -> list[str]:
        return sorted(n for n in names if n in self.stages and kind_of(self.stages[n]) == kind)

    def problems(self) -> Iterator[Problem]:
        reported: set[str] = set()
        for name, needs in sorted(self.needs.items()):
            seen: set[str] = set()
            for node in needs:
                if node.value in seen:
                    yield Problem.at(node.place, f"{node.value!r} is needed twice", "remove one")
                elif node.value not in self.stages:
                    known = [other for other in self.stages if other != name]
                    yield Problem.at(
                        node.place, f"there is no stage {node.value!r}", closest(node.value, known)
                    )
                elif node.value == name:
                    yield Problem.at(node.place, f"stage {name!r} needs itself", "remove it")
                seen.add(node.value)
            if name not in reported and name not in seen and name in self.before(name):
                cycle = self.cycle(name)
                reported.update(cycle)
                yield Problem.at(
                    needs[0].place,
                    f"stages need each other in a circle: {' -> '.join([*cycle, cycle[0]])}",
                    "remove one of these needs",
                )

    def cycle(self, start: str) -> list[str]:
        """The shortest circle of needs through `start`."""
        previous: dict[str, str] = {}
        todo = [start]
        for name in todo:
            for node in self.needs.get(name, []):
                if node.value == start:
                    path = [name]
                    while path[-1] != start:
                        path.append(previous[path[-1]])
                    return path[::-1]
                if node.value not in previous:
                    previous[node.value] = name
                    todo.append(node.value)
        return [start]


def _kind(stage: Node) -> Iterator[Problem]:
    kinds = [kind for kind in KINDS if kind in stage.value]
    choices = "write exactly one of command, train, evaluate, promote"
    if not kinds:
        yield Problem.at(stage.place, "the stage does nothing", choices)
    for kind in kinds[1:]:
        yield _problem(
            stage.value[kind], f"the stage is {kinds[0]!r} already, so {kind!r} is too much", choices
        )


def _resources(stage: Node) -> Iterator[Problem]:
    resources = get(stage, "resources")
    if resources is None:
        return
    gpus, workers = get(resources, "gpus_per_node"), get(resources, "workers_per_node")
    num_gpus = gpus.value if gpus is not None and isinstance(gpus.value, int) else 0
    if gpus is not None and num_gpus > 0:
        if get(resources, "gpu") is None:
            yield _problem(
                gpus, "GPUs without a model: memory and peak are unknown", "add 'gpu: H100-80GB' or the like"
            )
        if workers is not None and workers.value != num_gpus:
            yield _problem(workers, "a worker drives exactly one GPU", "remove workers_per_node")
    device = get(resources, "device")
    if device is not None and num_gpus == 0:
        yield _problem(device, "device describes a GPU, and there is none", "remove it, or set gpus_per_node")


def _env(stage: Node) -> Iterator[Problem]:
    env = get(stage, "env")
    if env is None or not isinstance(env.value, dict):
        return
    for name, node in env.value.items():
        if TAKEN.fullmatch(name):
            yield _problem(node, f"{name} is set by torchrun and mlpipe", "remove it")
        elif _SECRET.search(name):
            yield _problem(
                node,
                f"{name} looks like a secret, and a pipeline file is stored and shown",
                "export it where the stage runs instead",
            )


def _train(stage: Node) -> Iterator[Problem]:
    train = get(stage, "train")
    if train is None or not isinstance(train.value, dict):
        return
    for key, other in (("model", "preset"), ("data", "tokens")):
        part = get(train, key)
        if part is None or not isinstance(part.value, dict):
            continue
        own, ours = get(part, "entry"), get(part, other)
        if own is not None and ours is not None:
            yield _problem(ours, f"{key} has both 'entry' and {other!r}", "keep one of them")
        if own is None and ours is None:
            yield _problem(
                part, f"{key} has neither {other!r} nor 'entry'", f"add '{other}: ...' or 'entry: ...'"
            )
    data = get(train, "data")
    if data is not None and get(data, "entry") is None and isinstance(data.value, dict):
        tokens, sequences = get(data, "batch_tokens"), get(data, "batch_size")
        seq_len = get(train, "model", "seq_len")
        if tokens is not None and sequences is not None:
            yield _problem(sequences, "batch_size and batch_tokens say the same thing", "keep one of them")
        if tokens is None and sequences is None and get(data, "tokens") is not None:
            yield _problem(data, "the batch has no size", "add 'batch_size: 32' (sequences) or batch_tokens")
        if tokens is not None and seq_len is not None and _positive(tokens) and _positive(seq_len):
            rest = tokens.value % seq_len.value
            if rest:
                nearest = max(1, round(tokens.value / seq_len.value)) * seq_len.value
                yield _problem(
                    tokens,
                    f"batch_tokens {tokens.value} is not a multiple of seq_len {seq_len.value}",
                    f"write {nearest}",
                )
        if get(train, "model", "entry") is not None and seq_len is None and get(data, "tokens") is not None:
            yield _problem(
                train.value["model"],
                "a model fed with tokens needs their number in a sample",
                "add 'seq_len: 512'",
            )
    strategy, mesh = get(train, "strategy"), get(train, "mesh")
    if mesh is not None and text_of(strategy) != "hsdp":
        yield _problem(mesh, "only strategy hsdp has a mesh to choose", "remove it, or write strategy: hsdp")
    patience = get(train, "hang_timeout")
    if patience is not None and 0 < _seconds(patience) < _SHORTEST_HANG_SECONDS:
        yield _problem(patience, f"hang_timeout {patience.value!r} would end any run", "write 1 s or more")
    optimizer = get(train, "optimizer")
    decay = get(optimizer, "decay_steps") if optimizer is not None else None
    if optimizer is not None and decay is not None and text_of(get(optimizer, "schedule")) != "wsd":
        yield _problem(decay, "only schedule wsd has decay_steps", "remove it, or write schedule: wsd")
    steps = get(train, "steps")
    for key in ("warmup_steps", "decay_steps"):
        node = get(optimizer, key) if optimizer is not None else None
        if node is None or steps is None or not _positive(node) or not _positive(steps):
            continue
        if node.value > steps.value:
            yield _problem(node, f"{key} {node.value} is more than the {steps.value} steps", "write less")


def _seconds(node: Node) -> float:
    """0 for what is no duration."""
    try:
        return parse_seconds(text_of(node) or "")
    except ValueError:
        return 0.0


def _positive(node: Node) -> bool:
    return isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 0


def _references(stage: Node, graph: _Graph) -> Iterator[Problem]:
    """`evaluate.train`, `promote.train` and `promote.evaluate` name one stage among the needs."""
    name, kind = text_of(get(stage, "name")), kind_of(stage)
    if kind not in ("evaluate", "promote") or name is None or not isinstance(stage.value[kind].value, dict):
        return
    before = graph.before(name)
    for key in ("train",) if kind == "evaluate" else ("train", "evaluate"):
        there = graph.of_kind(key, before)
        node = get(stage, kind, key)
        if node is not None and isinstance(node.value, str):
            if node.value not in there:
                yield _problem(
                    node, f"{node.value!r} is no {key} stage that {name!r} needs", closest(node.value, there)
                )
        elif node is None and len(there) > 1:
            yield _problem(
                stage.value[kind],
                f"{name!r} needs several {key} stages: {', '.join(there)}",
                f"say which with '{key}: {there[0]}'",
            )
        elif node is None and not there and key == "train":
            trains = graph.of_kind("train", set(graph.stages))
            hint = f"add 'needs: [{trains[0]}]'" if trains else "add a train stage"
            yield _problem(stage.value[kind], f"{name!r} needs no train stage", hint)


def _placeholders(stage: Node, graph: _Graph) -> Iterator[Problem]:
    name, kind = text_of(get(stage, "name")) or "", kind_of(stage)
    before = graph.before(name)
    for part in ("command", "env", "train"):
        node = get(stage, part)
        if node is None:
            continue
        for path, leaf in node.walk():
            if part == "train" and path[:2] != ("data", "tokens") and path[1:2] != ("args",):
                continue
            if not isinstance(leaf.value, str) or leaf.broken:
                continue
            for placeholder in placeholders.names(leaf.value):
                found = _placeholder(placeholder, kind, before, graph)
                if found is not None:
                    yield Problem.at(leaf.place, *found)


def _placeholder(name: str, kind: str | None, before: set[str], graph: _Graph) -> tuple[str, str] | None:
    if name == "":
        return "a placeholder '{{' without its '}}'", "close it, or write '{{{{' for two literal braces"
    if name == "output":
        if kind == "command":
            return None
        return "{{output}} is the folder of a command stage", "write {{stages.NAME.output}}"
    if name in placeholders.FIXED:
        return None
    stage = placeholders.stage_of(name)
    if stage in before and stage in graph.stages and kind_of(graph.stages[stage]) == "command":
        return None
    commands = graph.of_kind("command", before)
    if stage is None:
        known = [*placeholders.FIXED, *(f"stages.{c}.output" for c in commands)]
        return f"unknown placeholder {{{{{name}}}}}", closest(name, known)
    if stage not in graph.stages:
        return f"placeholder to an unknown stage {stage!r}", closest(stage, commands)
    if stage not in before:
        return f"{{{{{name}}}}} of a stage that is not needed", f"add {stage!r} to needs"
    return f"{{{{{name}}}}}: only command stages have an output folder", closest(stage, commands)


def values_at(root: Node, path: Sequence[Any]) -> tuple[Node, bool]:
    """The deepest node along a pydantic location, and whether its last part was found there."""
    node, found = root, True
    for part in path:
        child = None
        if isinstance(node.value, dict):
            child = node.value.get(part)
        elif isinstance(node.value, list) and isinstance(part, int) and part < len(node.value):
            child = node.value[part]
        found = child is not None
        node = child or node
    return node, found
