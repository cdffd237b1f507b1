"""A pipeline file to a Pipeline, or every mistake in it at once."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.spec import rules
from mlpipe.spec.base import model_of
from mlpipe.spec.model import Pipeline
from mlpipe.spec.problems import Place, Problem, SpecErrors, closest
from mlpipe.spec.tree import JSON_KEYS, MAX_BYTES, Ambiguous, Node, get, items_of, parse, scalar, text_of

if TYPE_CHECKING:
    from mlpipe.spec.network import NetworkProfile

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def load_pipeline(path: str | Path, *, overrides: Sequence[str] = ()) -> Pipeline:
    """Read, override (`KEY=VALUE`, see `spec/overrides.py`) and check. Raises SpecErrors."""
    return read_pipeline(path, overrides=overrides)[1]


def read_pipeline(path: str | Path, *, overrides: Sequence[str] = ()) -> tuple[str, Pipeline]:
    """As `load_pipeline`, with the text that it was made of: before `overrides`, every newline a `\\n`, as a
    run keeps it and its digests are taken. The file is read once: both are of the same moment."""
    name = str(path)
    data = _read(path, "name an existing file, or write one with 'mlpipe init'")
    pipeline = load_pipeline_text(data, name, overrides=overrides)
    return _decode(data, name).replace("\r\n", "\n").replace("\r", "\n"), pipeline


def read_as(kind: type[AnyModel], path: str | Path) -> AnyModel:
    """Of another file of the user's, whose keys are those of `kind`. Raises SpecErrors."""
    name = str(path)
    root, problems = parse(_decode(_read(path, "name an existing file"), name), name)
    if root is None:
        raise SpecErrors(problems)
    problems += _nulls(root)
    found, more = _validate(root, name, kind)
    if problems or found is None:
        raise SpecErrors(problems + _elsewhere(more, problems))
    return found


def read_networks(path: Path) -> dict[str, NetworkProfile]:
    """Profiles of the user's own, by name. Raises SpecErrors."""
    from mlpipe.spec import network  # of few files

    found = read_as(network.Networks, path).networks
    if taken := sorted(found.keys() & set(network.built_in())):
        hint = f"choose another name, and write 'extends: {taken[0]}'"
        place = network.place_of(path, taken[0])
        raise SpecErrors([Problem.at(place, f"{taken[0]!r} is built in", hint)])
    return found


def _read(path: str | Path, hint: str) -> bytes:
    try:
        if os.path.isfile(path):
            with open(path, "rb") as stream:
                return stream.read(MAX_BYTES + 1)
        from mlpipe._core.files import read_file  # of few: a pipe, a device, what is not there

        return read_file(path, MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SpecErrors([Problem.at(Place(str(path)), f"cannot be read: {reason}", hint)]) from None


def load_pipeline_text(text: str | bytes, name: str, *, overrides: Sequence[str] = ()) -> Pipeline:
    """As `load_pipeline`, of text; `name` stands for the file in messages."""
    root, problems = parse(_decode(text, name), name)
    if root is None:
        raise SpecErrors(problems)
    if overrides:
        from mlpipe.spec.overrides import apply

        problems += [problem for override in overrides for problem in apply(root, override)]
    problems += _nulls(root)
    pipeline, problems = _check(root, name, problems)
    if not problems and pipeline is not None and pipeline.sweep is not None:
        pipeline, problems = _with_sweep(root, name)
    if problems or pipeline is None:
        raise SpecErrors(problems)
    pipeline._origin.update(_places(root))
    return pipeline


def _places(root: Node) -> dict[str, Place]:
    places = {}
    for stage in items_of(root, "stages"):
        node, resources = get(stage, "name"), get(stage, "resources")
        if (name := text_of(node)) is not None and node is not None:
            places[name] = node.place if resources is None else resources.key or resources.place
    return places


def _with_sweep(root: Node, name: str) -> tuple[Pipeline | None, list[Problem]]:
    """Of a file that is right but for its sweep: the keys there are written out."""
    from mlpipe.spec import sweep_rules  # of few files

    def problems_of(trial: Node) -> list[Problem]:
        return _check(trial, name, [])[1]

    problems = list(sweep_rules.check(root, problems_of))
    if problems:
        return None, problems
    sweep_rules.write_keys_out(root)
    pipeline, problems = _validate(root, name, Pipeline)
    if pipeline is not None and pipeline.sweep is not None:
        problems += sweep_rules.check_trials(root, pipeline.sweep, problems_of)
    return pipeline, problems


def _check(root: Node, name: str, problems: list[Problem]) -> tuple[Pipeline | None, list[Problem]]:
    """Added to those that are known."""
    written: list[Problem] = []
    if get(root, "network") is not None:
        from mlpipe.spec import network  # of few files

        written = list(network.write_out(root, read_networks))
    pipeline, more = _validate(root, name, Pipeline)
    ruled = _elsewhere([*rules.check(root), *_of_sections(root), *written], problems)
    return pipeline, problems + _elsewhere(_elsewhere(more, problems), ruled, but=("unknown key",)) + ruled


def _of_sections(root: Node) -> Iterator[Problem]:
    """What violates their own rules, which are imported for the files that have them."""
    for module in ("kubernetes_rules", "slurm_rules", "network"):
        if get(root, module.removesuffix("_rules")) is not None:
            yield from import_module(f"mlpipe.spec.{module}").check(root)


def _elsewhere(later: list[Problem], before: list[Problem], but: tuple[str, ...] = ()) -> list[Problem]:
    """One word a place: what YAML itself, a rule and a type say of one value is one mistake. But a mapping
    starts where its first key does, and what it lacks is another matter; and all that an override sets has
    one place."""
    places = {problem.place for problem in before}
    return [
        problem
        for problem in later
        if problem.place not in places
        or not problem.line
        or problem.message.endswith("is missing")
        or problem.message.startswith(but)
    ]


def _decode(text: str | bytes, name: str) -> str:
    if isinstance(text, str):
        text = text.encode("utf-8", "surrogatepass")
    if len(text) > MAX_BYTES:
        hint = "move data to a file that a command reads"
        raise SpecErrors([Problem.at(Place(name), f"larger than {MAX_BYTES} bytes", hint)])
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = text[: error.start].decode("utf-8-sig", "replace")
        place = Place(name, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        message = f"the byte 0x{text[error.start]:02x} is not UTF-8"
        raise SpecErrors([Problem.at(place, message, "save the file as UTF-8")]) from None


def _nulls(root: Node) -> list[Problem]:
    """A key without a value is a slip, except where any JSON may stand, whose null is a value."""
    problems = []
    for path, node in root.walk():
        if node.value is None and not node.broken and path and not JSON_KEYS & set(path):
            node.broken, last = True, path[-1]
            what, where = (f"item {last + 1}", "'-'") if isinstance(last, int) else (repr(last), "key")
            problems.append(
                Problem.at(
                    node.key or node.place, f"{what} has no value", f"write one, or remove the {where}"
                )
            )
    return problems


def _validate(root: Node, name: str, model: type[AnyModel]) -> tuple[AnyModel | None, list[Problem]]:
    for retry in (True, False):
        try:
            return model.model_validate(root.plain()), []
        except ValidationError as error:
            details = error.errors(include_url=False)
        if not (retry and _as_text(root, details)):
            break
    problems: list[Problem] = []
    for detail in details:
        node, exists = rules.values_at(root, detail["loc"])
        kind, key = detail["type"], detail["loc"][-1] if detail["loc"] else ""
        partial = kind == "too_short" and node.value  # counted without the items that are wrong
        by_rule = kind in ("missing", "extra_forbidden") and key in ("preset", "tokens")
        if node.broken or partial or by_rule:
            continue
        problem = _problem(node, exists, detail, model)
        last = problems[-1] if problems else None
        if last is not None and kind == "literal_error" and last.place == problem.place:
            # the other half of `a number or 'auto'`
            options = detail["ctx"]["expected"]
            problems[-1] = Problem.at(last.place, last.message, f"{last.hint} or {options}")
        else:
            problems.append(problem)
    return None, problems


def _as_text(root: Node, details: list[ErrorDetails]) -> bool:
    """Overrides need no quotes: where the schema wants text, take what was written. True: it did so."""
    changed = False
    for detail in details:
        node, exists = rules.values_at(root, detail["loc"])
        if exists and detail["type"] == "string_type" and not node.place.line and node.text is not None:
            node.value, node.broken, changed = node.text, False, True
    return changed


_ARTICLES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a mapping of keys to values",
    "model_type": "a mapping of keys to values",
    "model_attributes_type": "a mapping of keys to values",
    "union_tag_invalid": "a mapping of keys to values",
}
_MOST = 1e18  # beyond it a number without quotes is not read as a whole one (spec/tree.py)
_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}


def _problem(node: Node, exists: bool, detail: ErrorDetails, model: type[BaseModel]) -> Problem:
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    key = detail["loc"][-1] if detail["loc"] else ""
    if kind == "missing" and isinstance(key, int):
        return Problem.at(node.place, "the list is too short", f"write at least {key + 1} items")
    if kind == "missing":
        return Problem.at(node.place, f"{key!r} is missing", f"add '{key}: ...'")
    if kind == "extra_forbidden":
        known = _known_keys(detail["loc"], model)
        return Problem.at(node.key or node.place, f"unknown key {key!r}", closest(str(key), known))
    if kind == "union_tag_invalid" and key == "optimizer":  # by its name
        node, kind, context = node.value["name"], "literal_error", {"expected": ", ".join(OPTIMIZERS)}
        value = node.value
    if isinstance(value, Ambiguous):
        return Problem.at(node.place, value.message, value.hint)
    if kind == "mlpipe" and key == "[key]":
        return Problem.at(node.key or node.place, context["what"], context["hint"])
    if kind == "mlpipe":
        return Problem.at(node.place, context["what"], context["hint"])
    if kind == "literal_error":
        options = context["expected"].replace(" or ", ", ").replace("'", "").split(", ")
        if value in options:
            return Problem.at(
                node.place, f"expected {value}, got the text {value!r}", "write it without quotes"
            )
        if isinstance(value, str):
            return Problem.at(node.place, f"unknown value {value!r}", closest(value, options))
        return Problem.at(node.place, f"{_show(value)} is not a choice", f"write one of {', '.join(options)}")
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and abs(value) >= _MOST:
        return Problem.at(node.place, f"{_show(value)} is out of bounds", "write a smaller number")
    if kind in _ARTICLES:
        wanted = _ARTICLES[kind]
        return Problem.at(
            node.place, f"expected {wanted}, got {_show(value)}", _rewrite(kind, value, node, wanted, key)
        )
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return Problem.at(node.place, f"{_show(value)} is out of bounds", f"write {words} {context[name]}")
    if kind in ("too_short", "too_long"):
        few, what = kind == "too_short", "mapping" if isinstance(value, dict) else "list"
        number = context["min_length" if few else "max_length"]
        return Problem.at(
            node.place, f"the {what} is too {kind[4:]}", f"write at {'least' if few else 'most'} {number}"
        )
    return Problem.at(node.place, detail["msg"][:1].lower() + detail["msg"][1:], "see 'mlpipe schema'")


# Of mappings that are often written as a word, the key that it belongs to.
_FIRST_KEYS = {"PresetModel": "preset", "TokenData": "tokens", "AdamW": "name"}


def _rewrite(kind: str, value: Any, node: Node, wanted: str, key: Any) -> str:
    if kind == "string_type" and node.text is not None:
        return f'write "{node.text}" in quotes'
    if kind in ("int_type", "float_type", "bool_type") and isinstance(value, str) and node.text is None:
        return f"write {wanted}, without quotes"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if kind in ("tuple_type", "list_type") and not isinstance(value, dict):
        return f"write [{_flat(', '.join(map(_quoted, str(value).split())))}]"
    if kind in ("tuple_type", "list_type"):
        return "write a list: each of its items begins with '- '"
    if isinstance(value, str) and key in _FIRST_KEYS:
        return f"write {{{_FIRST_KEYS[key]}: {_flat(value)}}}"
    return f"write {wanted}"


def _quoted(word: str) -> str:
    """As it is text in a list."""
    is_plain = re.fullmatch(r"[A-Za-z0-9_./=+-]+", word) and isinstance(scalar(word), str)
    return word if is_plain else json.dumps(word, ensure_ascii=False)


def _flat(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "nothing"
    return f"the text {_flat(value)!r}" if isinstance(value, str) else _flat(value)


def _known_keys(loc: tuple[int | str, ...], model: type[BaseModel]) -> list[str]:
    """Keys of the mapping in which the last part of `loc` is unknown."""
    inside: list[type[BaseModel]] = [model]  # several: of a union, whose choice is the next part
    for part in loc[:-1]:
        if isinstance(part, int):
            continue
        chosen = [model for model in inside if model.__name__ == part]
        fields = {field.alias or name: field for name, field in inside[0].model_fields.items()}
        if chosen:
            inside = chosen
        elif part in fields:
            inside = _models_in(fields[part].annotation) or inside
    return [field.alias or name for name, field in inside[0].model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if (model := model_of(annotation)) is not None:
        return [model]
    return [model for part in get_args(annotation) for model in _models_in(part)]
