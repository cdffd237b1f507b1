"""Plain data to YAML that every YAML 1.1 and 1.2 parser reads alike, byte for byte the same each time: text
is quoted unless it is a plain word that nobody takes for something else.

PyYAML emits; the style of each value is decided here. The sha256 of a pipeline in this form says which
pipeline a run is of, so a changed byte would estrange a pipeline from its former runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import yaml

from mlpipe._core.errors import RenderError

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([-./][A-Za-z0-9_]+)*")
_RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}
_BLOCK = re.compile(
    r"[!-~][ -~\n]*"
)  # printable ASCII; an indented first line would be taken for indentation
_MAX_KEY = 1000  # YAML 1.2, 7.4: a key on one line has at most 1024 characters
_WIDTH = 100
_NO_LIMIT = 2**31


def to_yaml(data: Any) -> str:
    """In block style, keys in the given order, a text on one line; lists without mappings in flow style."""
    return _dump(_node(data, 0, 0, None), explicit_start=False)


def documents(objects: Iterable[dict[str, Any]]) -> str:
    """One document an object, as people review them: long text such as plan.json stands as a block of lines,
    and a list in flow style only if it fits its line. Raises RenderError for what YAML cannot say."""
    return "".join(_dump(_node(document, 0, 0, _WIDTH), explicit_start=True) for document in objects)


def _dump(node: yaml.Node, *, explicit_start: bool) -> str:
    text: str = yaml.serialize(node, Dumper=_Dumper, explicit_start=explicit_start, width=_NO_LIMIT)
    return text


def _node(value: Any, indent: int, head: int, width: int | None) -> yaml.Node:
    """`indent`: column of its keys or dashes. `head`: columns of its line that are taken. `width`: of a line;
    None: see `to_yaml`."""
    if isinstance(value, dict):
        pairs = []
        for key, item in value.items():
            name = _scalar(key)
            length = len(_text(name))
            if width is not None and length > _MAX_KEY:
                raise RenderError(
                    f"a key of {len(key)} characters: {key[:40]!r}...", hint="write a shorter one"
                )
            pairs.append((name, _node(item, indent + 2, indent + length + 1, width)))
        return yaml.MappingNode("tag:yaml.org,2002:map", pairs, flow_style=False)
    if isinstance(value, list):
        # a list in a list is never in flow style where lines have a width
        items = [_node(item, indent + 2, _NO_LIMIT, width) for item in value]
        if width is None:
            flow = not any(isinstance(item, yaml.MappingNode) for item in items)
        else:
            words = [_text(item) for item in items if isinstance(item, yaml.ScalarNode)]
            flow = len(words) == len(items) and head + len(f" [{', '.join(words)}]") <= width
        return yaml.SequenceNode("tag:yaml.org,2002:seq", items, flow_style=flow)
    return _scalar(value, block=width is not None)


def _scalar(value: Any, *, block: bool = False) -> yaml.ScalarNode:
    kind, text, style = "str", str(value), None
    if value is None:
        kind, text = "null", "null"
    elif isinstance(value, bool):
        kind, text = "bool", str(value).lower()
    elif isinstance(value, int):
        kind = "int"
    elif isinstance(value, float):
        # PyYAML reads 1e-05 as text
        kind, text = "float", text if "e" not in text or "." in text else text.replace("e", ".0e")
    elif block and _is_block(value):
        style = "|"
    elif not _WORD.fullmatch(value) or value.lower() in _RESERVED:
        style = '"'
    return yaml.ScalarNode(f"tag:yaml.org,2002:{kind}", text, style=style)


def _is_block(text: str) -> bool:
    """Whether a literal block says it: several lines, and no blank ones at the end, which would be lost."""
    lines = text.removesuffix("\n").split("\n")
    return len(lines) > 1 and lines[-1].strip() != "" and _BLOCK.fullmatch(text) is not None


def _text(node: yaml.ScalarNode) -> str:
    """On one line."""
    return _quoted(node.value) if node.style else str(node.value)


def _quoted(text: str) -> str:
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Dumper(yaml.SafeDumper):
    """Takes every style from its node and decides none by the look of a text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> None:
        pass  # what tag a reader would give it

    def process_tag(self) -> None:
        pass  # none is written

    def check_simple_key(self) -> bool:
        return True  # never `? key`

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # dashes stand below their key, not beside it

    def expect_block_sequence(self) -> None:
        if self.sequence_context:
            self.indention = False  # a list in a list begins on a line of its own
        super().expect_block_sequence()

    # PyYAML goes through each text by character, which took half of the time of all.
    def process_scalar(self) -> None:
        event: Any = self.event
        if event.style == "|" and not self.flow_level:
            self.write_literal(event.value)
        else:
            self.write_indicator(_quoted(event.value) if event.style else event.value, True)

    def write_literal(self, text: str) -> None:
        ends, pad = text.endswith("\n"), " " * (self.indent or 0)
        self.write_indicator("|" if ends else "|-", True)
        self.write_line_break()
        lines = text.removesuffix("\n").split("\n")
        self.write_indicator("\n".join(line and pad + line for line in lines), False)
        if ends:
            self.write_line_break()
