"""`--set KEY=VALUE`: one value of the file, replaced.

KEY is the path of keys in the file, joined by dots, where an item of `stages` goes by its name:
`stages.train.train.steps`, `store`. The leading `stages.` and the stage's kind may be left out:
`train.steps`, `train.resources.nodes`. VALUE is YAML (`8`, `[0.9, 0.95]`, `{a: 1}`); text needs no quotes,
since the schema says which fields are text.
"""

from __future__ import annotations

from mlpipe.spec.model import Evaluate, Pipeline, Promote, Stage, Train
from mlpipe.spec.problems import Place, Problem
from mlpipe.spec.rules import closest, kind_of, text_of
from mlpipe.spec.tree import Ambiguous, Node, parse

_KIND_FIELDS: dict[str, set[str]] = {
    "train": set(Train.model_fields),
    "evaluate": set(Evaluate.model_fields),
    "promote": {field.alias or name for name, field in Promote.model_fields.items()},
    "command": set(),
}
_TOP = set(Pipeline.model_fields)
_STAGE = set(Stage.model_fields)


def apply(root: Node, override: str) -> list[Problem]:
    """Put the value into the tree. Problems name the override as `--set KEY=VALUE`."""
    place = Place(f"--set {override}")
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        return [Problem.at(place, "not KEY=VALUE", "write like --set train.steps=20")]
    if not isinstance(root.value, dict):
        return []
    value, problems = parse(text, place.file) if text.strip() else (Node("", place, text=""), [])
    if problems or value is None:
        return [Problem.at(place, problem.message, problem.hint) for problem in problems[:1]]
    for _, node in value.walk():
        node.place = node.key = place
        if isinstance(node.value, Ambiguous):
            node.value = str(node.value)
    return _put(root, key.strip(), value, place)


def _put(root: Node, key: str, value: Node, place: Place) -> list[Problem]:
    target, parts = root, key.split(".")
    if parts[0] not in _TOP or (parts[0] == "stages" and len(parts) > 1):
        found = _stage(root, key.removeprefix("stages."))
        if found is None:
            known = sorted(filter(None, (text_of(s.value.get("name")) for s in _stages(root))))
            word = key.removeprefix("stages.").split(".")[0]
            choices = [*known, *(sorted(_TOP) if parts[0] != "stages" else [])]
            return [Problem.at(place, f"no stage {word!r}", closest(word, choices))]
        target, rest = found
        parts = rest.split(".") if rest else []
        if not parts:
            return [Problem.at(place, "a stage cannot be replaced", "set its keys, like NAME.steps=20")]
        kind = kind_of(target)
        if kind is not None and parts[0] != kind and parts[0] in _KIND_FIELDS[kind]:
            parts = [kind, *parts]
        elif parts[0] not in _STAGE:
            choices = sorted(_STAGE | _KIND_FIELDS[kind or "command"])
            return [Problem.at(place, f"unknown key {parts[0]!r}", closest(parts[0], choices))]
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


def _stages(root: Node) -> list[Node]:
    stages = root.value.get("stages")
    if stages is None or not isinstance(stages.value, list):
        return []
    return [stage for stage in stages.value if isinstance(stage.value, dict)]


def _stage(root: Node, key: str) -> tuple[Node, str] | None:
    """The stage whose name starts `key` (names may hold dots: the longest wins), and the rest."""
    best: tuple[Node, str] | None = None
    for stage in _stages(root):
        name = text_of(stage.value.get("name"))
        if name and (key == name or key.startswith(name + ".")):
            rest = key[len(name) + 1 :]
            if best is None or len(rest) < len(best[1]):
                best = (stage, rest)
    return best
