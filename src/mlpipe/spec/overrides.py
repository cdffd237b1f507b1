"""`--set KEY=VALUE`: one value of the file, replaced; `--set KEY=null` removes the key.

KEY is the path of keys in the file, joined by dots, where an item of `stages` goes by its name:
`stages.train.train.steps`, `store`. The leading `stages.` and the stage's kind may be left out:
`train.steps`, `train.resources.nodes`. VALUE is YAML (`8`, `[0.9, 0.95]`, `{a: 1}`); text needs no quotes,
since the schema says which fields are text, nor does a placeholder (`{{stages.corpus.output}}`). Inside
`args` and patches null is a value like any other. Where a mapping has keys that hold dots, the longest that
fits is meant; what follows `sweep.over` is one key, if there is none.

Another `train.strategy` drops what stood there for the former one alone (`mesh`), and a warning says so; a
mesh that is set beside it stays, whichever is written first.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from mlpipe.spec.base import model_of
from mlpipe.spec.model import Pipeline, Stage
from mlpipe.spec.part import kind_of, spec_part
from mlpipe.spec.problems import Place, Problem, closest
from mlpipe.spec.tree import JSON_KEYS, Ambiguous, Node, get, items_of, parse, text_of

_log = logging.getLogger(__name__)
_TOP = set(Pipeline.model_fields)
_STAGE = {field.alias or name for name, field in Stage.model_fields.items()}
_OVER = ["sweep", "over"]  # its keys are those of overrides


def side_by_side(overrides: Sequence[str]) -> tuple[str, ...]:
    """Those of one command in an order that means the same whatever theirs is: a strategy, which may drop the
    mesh of before, stands ahead of the meshes beside it."""
    ordered: list[str] = []
    for override in overrides:
        is_strategy = _key(override)[-1:] == ["strategy"]
        meshes = (at for at, other in enumerate(ordered) if "mesh" in _key(other)[-2:])
        ordered.insert(next(meshes, len(ordered)) if is_strategy else len(ordered), override)
    return tuple(ordered)


def _key(override: str) -> list[str]:
    return override.partition("=")[0].strip().split(".")


def apply(root: Node, override: str) -> list[Problem]:
    """Put the value into the tree. Problems name the override as `--set KEY=VALUE`."""
    place = Place(f"--set {override}")
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return [Problem.at(place, "not KEY=VALUE", "write like --set train.steps=20")]
    if not isinstance(root.value, dict):
        return []
    is_text = not text.strip() or text.lstrip().startswith("{{")  # no mapping of mappings: a placeholder
    value, problems = (Node(text.strip(), place), []) if is_text else parse(text, place.file)
    if problems or value is None:
        return [Problem.at(place, problem.message, problem.hint) for problem in problems[:1]]
    for _, node in value.walk():
        node.place = node.key = place
        if isinstance(node.value, Ambiguous):
            node.value = str(node.value)
    return put(root, key.strip(), value, place)


def put(root: Node, key: str, value: Node, place: Place) -> list[Problem]:
    """`value` at the KEY of an override. Problems are at `place`."""
    target, parts = root, key.split(".")
    if parts[0] not in _TOP or (parts[0] == "stages" and len(parts) > 1):
        named = stage(root, key.removeprefix("stages."))
        if named is None:
            known = sorted(filter(None, (text_of(s.value.get("name")) for s in stages(root))))
            word = key.removeprefix("stages.").split(".")[0]
            choices = [*known, *(sorted(_TOP) if parts[0] != "stages" else [])]
            owner = next((text_of(one.value.get("name")) for one in stages(root) if word in _keys(one)), None)
            hint = f"did you mean {owner}.{key.removeprefix('stages.')}?" if owner else closest(word, choices)
            return [Problem.at(place, f"no stage {word!r}", hint)]
        target, rest = named
        parts = rest.split(".") if rest else []
        if not parts:
            return [Problem.at(place, "a stage cannot be replaced", "set its keys, like NAME.steps=20")]
        kind, own = kind_of(target), _keys(target)
        if kind is not None and parts[0] != kind.name and parts[0] in own:
            parts = [kind.name, *parts]
        elif parts[0] not in _STAGE:
            choices = sorted(_STAGE | own)
            return [Problem.at(place, f"unknown key {parts[0]!r}", closest(parts[0], choices))]
    parts = _joined(target, parts)
    if value.value is None and not JSON_KEYS & set(parts[:-1]):
        return _remove(target, parts, Pipeline if target is root else Stage, place)
    if target is not root:
        _adapt(target, parts, value, place)
    for part in parts[:-1]:
        child = target.value.get(part)
        if child is None or child.broken:
            child = target.value[part] = Node({}, place, key=place)
        if not isinstance(child.value, dict):
            what = "a list" if isinstance(child.value, list) else "a value"
            return [Problem.at(place, f"{part!r} is {what}, it has no keys", f"set {part} as a whole")]
        target = child
    target.value[parts[-1]] = value
    return []


def _joined(target: Node, parts: Sequence[str]) -> list[str]:
    """The path below `target`, where parts that are one key of the user's stand together."""
    path: list[str] = []
    here: Node | None = target
    while parts:
        there = here.value if here is not None and isinstance(here.value, dict) else {}
        rest = ".".join(parts)
        fitting = (key for key in there if f"{rest}.".startswith(f"{key}."))
        key = max(fitting, key=len, default=rest if path == _OVER else parts[0])
        path, parts, here = [*path, key], parts[key.count(".") + 1 :], there.get(key)
    return path


def _keys(stage: Node) -> set[str]:
    """Those of the stage's kind, which may be set without it."""
    kind = kind_of(stage)
    return set(spec_part(kind).keys) if kind is not None else set()


def _remove(target: Node, parts: Sequence[str], kind: type[BaseModel], place: Place) -> list[Problem]:
    """No mistake where the key is not there, if it could be: whatever stood there before, it is gone. What
    could be in `over` only the whole file tells, and a slip would leave varied what should not be."""
    if not _knows(kind, parts):
        return [Problem.at(place, f"unknown key {parts[-1]!r}", "see 'mlpipe schema'")]
    if parts[:2] == _OVER and parts[2:] and get(target, *parts) is None:
        over, key = get(target, *_OVER), ".".join(parts[2:])
        known = list(over.value) if over is not None and isinstance(over.value, dict) else []
        return [Problem.at(place, f"over has no {key!r}", closest(key, known))]
    for part in parts[:-1]:
        child = target.value.get(part)
        if child is None or not isinstance(child.value, dict):
            return []
        target = child
    target.value.pop(parts[-1], None)
    return []


def _knows(kind: Any, parts: Sequence[str]) -> bool:
    """Whether the schema has a key of this path. A mapping whose keys are the user's has any."""
    if not parts or get_origin(kind) is dict:
        return True
    if (model := model_of(kind)) is not None:
        fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
        return parts[0] in fields and _knows(fields[parts[0]], parts[1:])
    return any(_knows(part, parts) for part in get_args(kind))


def _adapt(stage: Node, parts: Sequence[str], value: Node, place: Place) -> None:
    """What fits the new value no more, its kind takes away."""
    kind = kind_of(stage)
    part = get(stage, parts[0])
    if kind is not None and parts[0] == kind.name and part is not None and isinstance(part.value, dict):
        words = spec_part(kind).overridden(part, parts[1:], value.value)
        if words is not None:
            _warn(f"{place}: {words}")


@cache  # a command may load its pipeline twice
def _warn(text: str) -> None:
    _log.warning(text)


def stages(root: Node) -> list[Node]:
    """Those that are mappings."""
    return [one for one in items_of(root, "stages") if isinstance(one.value, dict)]


def stage(root: Node, key: str) -> tuple[Node, str] | None:
    """The stage whose name starts `key` (names may hold dots: the longest wins), and the rest."""
    best: tuple[Node, str] | None = None
    for one in stages(root):
        name = text_of(one.value.get("name"))
        if name and (key == name or key.startswith(name + ".")):
            rest = key[len(name) + 1 :]
            if best is None or len(rest) < len(best[1]):
                best = (one, rest)
    return best
