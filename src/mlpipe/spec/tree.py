"""YAML text to a tree that knows where every key and value stands, with less of YAML than others take.

Plain scalars mean the same to every YAML parser or they are marked `Ambiguous`: `on`, `0123`, `22:22`
are not guessed. Anchors, aliases, tags, merge keys and duplicate keys are problems. Values are plain
Python data. Size, depth and the number of values are bounded, so a hostile file costs little.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mlpipe.spec.problems import Place, Problem

MAX_BYTES = 2**20
MAX_DEPTH = 32
MAX_VALUES = 15_000  # 1,000 stages are 13,000; reading as many takes half a second
MAX_KEY = 256
JSON_KEYS = {"args", "strategic", "json"}  # below them any JSON may stand, null as well

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NULLS = ("", "~", "null", "Null", "NULL")
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
# Compiled for files with scalars that hold what these need: few have any.
_SEXAGESIMAL = r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"
_UNDERSCORES = r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9][0-9_]*"
_RADIX = r"[-+]?0(b[01_]+|x[0-9a-fA-F_]+|o[0-7_]+)"
_OCTAL = r"[-+]?0[0-7_]+"
_DATE = r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].*)?"
_NOT_FINITE = r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"


class Ambiguous(str):
    """Unquoted text that YAML parsers read differently. `reading`: what some of them make of it;
    `instead`: what to write if that was meant."""

    reading: str
    instead: str

    def __new__(cls, text: str, reading: str, instead: str) -> Ambiguous:
        self = super().__new__(cls, text)
        self.reading = reading
        self.instead = instead
        return self

    @property
    def message(self) -> str:
        return f"{str(self)!r} without quotes is {self.reading} to some YAML parsers and text to others"

    @property
    def hint(self) -> str:
        return f'write "{self}" for the text' + (f", {self.instead} for the value" if self.instead else "")


@dataclass
class Node:
    """`value`: dict[str, Node], list[Node] or a scalar. `key`: where the node's key stands, if it has one.
    `broken`: already reported; say nothing more about it. `text`: of a plain scalar, as written."""

    value: Any
    place: Place
    key: Place | None = None
    broken: bool = False
    text: str | None = None

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def walk(self) -> Iterator[tuple[tuple[str | int, ...], Node]]:
        yield (), self
        children: list[tuple[str | int, Node]] = []
        if isinstance(self.value, dict):
            children = list(self.value.items())
        elif isinstance(self.value, list):
            children = list(enumerate(self.value))
        for name, child in children:
            for path, node in child.walk():
                yield (name, *path), node


def get(node: Node, *path: str) -> Node | None:
    """What stands there; None: nothing does."""
    for key in path:
        if not isinstance(node.value, dict) or key not in node.value:
            return None
        node = node.value[key]
    return node


def text_of(node: Node | None) -> str | None:
    """None: nothing stands there, or no text."""
    return str(node.value) if node is not None and isinstance(node.value, str) else None


def items_of(node: Node, key: str) -> list[Node]:
    """Of the list that stands there; none where it is no list."""
    items = get(node, key)
    return items.value if items is not None and isinstance(items.value, list) else []


def groups_of(stage: Node) -> list[Node]:
    """Those of its `resources`, where these list groups of machines."""
    return [one for one in items_of(stage, "resources") if isinstance(one.value, dict)]


def each_alone(stage: Node) -> list[Node]:
    """The stage as if it had one group, for each of them; else as it is."""
    groups = groups_of(stage)
    return [replace(stage, value={**stage.value, "resources": one}) for one in groups] or [stage]


def problem_of_key(node: Node, message: str, hint: str) -> Problem:
    """At the node's key if it has one: what is wrong is that it stands there."""
    return Problem.at(node.key or node.place, message, hint)


def scalar(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text in _NULLS:
        return None
    if text in _BOOLS:
        return _BOOLS[text]
    if _INT.fullmatch(text):
        return int(text)
    ambiguous = _ambiguous(text)
    if ambiguous is not None:
        return ambiguous
    if _FLOAT.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else Ambiguous(text, "infinite", "a finite number")
    return text


def _ambiguous(text: str) -> Ambiguous | None:
    if text.lower() in _WORDS and text in (text.lower(), text.upper(), text.capitalize()):
        meaning = _WORDS[text.lower()]
        return Ambiguous(text, f"the boolean {meaning}", meaning)
    if len(text) > 100:
        return None
    digits = text.replace("_", "")
    if ":" in text and re.fullmatch(_SEXAGESIMAL, text):
        total = 0.0
        for part in digits.lstrip("+-").split(":"):
            total = total * 60 + float(part)
        number = f"{-total if text[0] == '-' else total:.15g}"
        return Ambiguous(text, f"the number {number} (base 60)", number)
    begins_with_zero = text.lstrip("+-").startswith("0")
    if begins_with_zero and re.fullmatch(_RADIX, text):
        number = str(int(digits, 0))
        return Ambiguous(text, f"the number {number}", number)
    if begins_with_zero and re.fullmatch(_OCTAL, text):
        decimal = str(int(digits, 10))
        return Ambiguous(text, f"the number {int(digits, 8)} (octal)", decimal)
    if begins_with_zero and re.fullmatch(r"[-+]?0[0-9]+", text):
        return Ambiguous(text, f"the number {int(text)}", str(int(text)))
    if "_" in text and re.fullmatch(_UNDERSCORES, text):
        return Ambiguous(text, f"the number {digits}", digits)
    if text[4:5] == "-" and re.fullmatch(_DATE, text):
        return Ambiguous(text, "a date", "")
    if text[-3:].lower() in ("inf", "nan") and re.fullmatch(_NOT_FINITE, text):
        return Ambiguous(text, "a number that is not finite", "a finite number")
    if text in ("=", "<<"):
        return Ambiguous(text, "a directive", "")
    return None


class _Open:
    """A collection whose end has not come yet; `name`: the key whose value is awaited."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name: str | None = None
        self.name_place: Place | None = None
        self.drop = False
        self.awaits_value = False
        self.first: dict[str, Place] = {}


def parse(text: str, file: str) -> tuple[Node | None, list[Problem]]:
    """The tree (None when there is none) and every problem of the text itself. Never raises on content."""
    return _Builder(file).build(text)


class _Builder:
    def __init__(self, file: str) -> None:
        self.file = file
        self.problems: list[Problem] = []
        self.stack: list[_Open] = []
        self.root: Node | None = None
        self.num_values = 0

    def place(self, mark: Any) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)

    def problem(self, place: Place, message: str, hint: str | None = None) -> None:
        self.problems.append(Problem.at(place, message, hint))

    def build(self, text: str) -> tuple[Node | None, list[Problem]]:
        num_documents = 0
        loader: Any = None
        try:
            loader = yaml.SafeLoader(text)
            while loader.check_event():
                event = loader.get_event()
                if isinstance(event, yaml.DocumentStartEvent):
                    num_documents += 1
                    if num_documents > 1:
                        self.problem(
                            self.place(event.start_mark),
                            "a second YAML document, but a pipeline is one",
                            "remove the '---' and what follows, or put it in a file of its own",
                        )
                        break
                elif not self.take(event):
                    return None, self.problems
        except yaml.MarkedYAMLError as error:
            self.syntax(error, text)
            return None, self.problems
        except yaml.YAMLError as error:
            self.unreadable(text, error)
            return None, self.problems
        except (ValueError, OverflowError):  # out of PyYAML's own chr() and int()
            place = self.place(loader.get_mark()) if loader else Place(self.file, 1, 1)
            self.problem(place, "not YAML: an escape or directive with a number out of range", "remove it")
            return None, self.problems
        if self.root is None:
            self.problem(Place(self.file, 1, 1), "the file is empty", "start with 'version: 1'")
        return self.root, self.problems

    def syntax(self, error: yaml.MarkedYAMLError, text: str) -> None:
        mark = error.problem_mark or error.context_mark
        place = self.place(mark) if mark else Place(self.file, 1, 1)
        why = f" {error.context}" if error.context else ""
        hint = "check the indentation and quotes here and on the line above"
        if "'\\t'" in str(error.problem):
            hint = "indent with spaces, not tabs"
        elif "mapping values are not allowed" in str(error.problem):
            hint = "indent it as a key of the line above, or quote the text that holds the ':'"
        elif "'%'" in str(error.problem) or "'@'" in str(error.problem) or "'`'" in str(error.problem):
            hint = "quote the text"
        elif "\u00a0" in "".join(text.split("\n")[max(0, place.line - 2) : place.line]):
            hint = "a blank here or on the line above is a no-break space (U+00A0): write a space"
        self.problem(place, f"not YAML: {error.problem}{why}", hint)

    def unreadable(self, text: str, error: yaml.YAMLError) -> None:
        position = getattr(error, "position", 0)
        before = text[: position if isinstance(position, int) else 0]
        place = Place(self.file, before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1)
        reason = getattr(error, "reason", None) or str(error)
        character = getattr(error, "character", None)
        if isinstance(character, int):
            reason = f"the character U+{character:04X} is not allowed"
        self.problem(place, f"not YAML: {reason}", "write it as an escape in double quotes, or remove it")

    def take(self, event: Any) -> bool:
        """False: a limit was passed, stop."""
        if isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            self.stack.pop()
            return True
        if not isinstance(event, yaml.NodeEvent):
            return True
        place = self.place(event.start_mark)
        self.num_values += 1
        if self.num_values > MAX_VALUES or len(self.stack) >= MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH}" if len(self.stack) >= MAX_DEPTH else "too many values"
            self.problem(place, f"{what}, no pipeline is", "move the data to a file that a command reads")
            return False
        self.refuse_extras(event, place)
        node = self.node(event, place)
        top = self.stack[-1] if self.stack else None
        if top is None:
            self.root = node
        elif isinstance(top.node.value, list):
            top.node.value.append(node)
        elif not top.awaits_value:
            self.take_key(top, event, node)
            if isinstance(node.value, (dict, list)):
                self.stack.append(_Open(node))
            return True
        else:
            node.key = top.name_place
            if not top.drop and top.name is not None:
                top.node.value[top.name] = node
            top.awaits_value = False
        if isinstance(node.value, (dict, list)) and not node.broken:
            self.stack.append(_Open(node))
        return True

    def node(self, event: Any, place: Place) -> Node:
        if isinstance(event, yaml.MappingStartEvent):
            return Node({}, place)
        if isinstance(event, yaml.SequenceStartEvent):
            return Node([], place)
        if isinstance(event, yaml.AliasEvent):
            return Node(None, place, broken=True)
        text: str = event.value
        if event.style is None and event.implicit[0]:
            return Node(scalar(text), place, text=text)
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            self.problem(place, "text with a NUL or half a surrogate pair cannot be stored", "remove it")
            return Node("", place, broken=True)
        return Node(text, place)

    def refuse_extras(self, event: Any, place: Place) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.problem(
                place, f"alias *{event.anchor}: a pipeline has no aliases", "write the value out again"
            )
            return
        if event.anchor is not None:
            self.problem(
                place, f"anchor &{event.anchor}: a pipeline has no anchors", "remove it, and write values out"
            )
        if event.tag is not None:
            self.problem(
                place,
                f"tag {event.tag}: types come from the schema, not from tags",
                "remove the tag; quote a value to make it text",
            )

    def take_key(self, top: _Open, event: Any, node: Node) -> None:
        top.awaits_value = True
        top.name_place = node.place
        top.drop = True
        place = node.place
        if not isinstance(event, yaml.ScalarEvent):
            outer = top.node.place
            if isinstance(node.value, dict) and (outer.line, outer.col + 1) == (place.line, place.col):
                top.node.broken = True
                self.problem(outer, "'{{' without quotes opens two mappings", 'quote it: "{{...}}"')
            elif not node.broken:
                self.problem(place, "a key that is a list or a mapping", "write a plain word as the key")
            return
        name = event.value
        if node.broken:
            return
        if name == "<<" and node.text is not None:
            self.problem(node.place, "merge key <<: a pipeline has none", "write the keys out")
            return
        if len(name) > MAX_KEY:
            self.problem(node.place, f"a key of more than {MAX_KEY} characters", "shorten it")
            return
        if isinstance(node.value, Ambiguous):
            self.problem(node.place, f"key {node.value.message}", f'write "{name}":')
        elif not isinstance(node.value, str):
            self.problem(node.place, f"key {name!r} is not text", f'write "{name}":')
        if name in top.first:
            first = top.first[name]
            self.problem(
                node.place,
                f"duplicate key {name!r}, first at line {first.line}; other parsers keep only one of them",
                "remove one of the two",
            )
            return
        top.first[name] = node.place
        top.name = name
        top.drop = False
