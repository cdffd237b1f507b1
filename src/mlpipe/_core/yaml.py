"""Plain data to YAML that every YAML 1.1 and 1.2 parser reads alike, byte for byte the same each time: text
is quoted unless it is a plain word that nobody takes for something else.

PyYAML emits; the style of each value is decided here. The sha256 of a pipeline in this form says which
pipeline a run is of, so a changed byte would estrange a pipeline from its former runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import yaml

from mlpipe._core.errors import RenderError

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([-./][A-Za-z0-9_]+)*")
_RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}
_BLOCK = re.compile(
    r"[!-~][ -~\n]*"
)  # printable ASCII; an indented first line would be taken for indentation
_ESCAPED = re.compile(r"[^ !#-\[\]-~]")  # all but printable ASCII without " and \
_MAX_KEY = 1000  # YAML 1.2, 7.4: a key on one line has at most 1024 characters
_WIDTH = 100
_NO_LIMIT = 2**31


def to_yaml(data: Any) -> str:
    """In block style, keys in the given order, a text on one line; lists without mappings in flow style."""
    return _document(data, None, explicit=False)


def documents(objects: Iterable[dict[str, Any]]) -> str:
    """One document an object, as people review them: long text such as plan.json stands as a block of lines,
    and a list in flow style only if it fits its line. Raises RenderError for what YAML cannot say."""
    return "".join(_document(one, _WIDTH, explicit=True) for one in objects)


def _document(data: Any, width: int | None, *, explicit: bool) -> str:
    """`width`: of a line; None: see `to_yaml`."""
    events = [yaml.StreamStartEvent(), yaml.DocumentStartEvent(explicit=explicit)]
    _say(data, 0, 0, width, events)
    events += [yaml.DocumentEndEvent(explicit=False), yaml.StreamEndEvent()]
    text: str = yaml.emit(events, Dumper=_Dumper, width=_NO_LIMIT)
    return text


def _say(value: Any, indent: int, head: int, width: int | None, events: list[yaml.Event]) -> None:
    """Adds what PyYAML is to emit. `indent`: column of its keys or dashes. `head`: columns of its line that
    are taken."""
    if isinstance(value, dict):
        events.append(yaml.MappingStartEvent(None, None, implicit=True, flow_style=False))
        for key, item in value.items():
            name = _key(key)
            length = len(_text(name))
            if width is not None and length > _MAX_KEY:
                raise RenderError(
                    f"a key of {len(key)} characters: {key[:40]!r}...", hint="write a shorter one"
                )
            events.append(name)
            _say(item, indent + 2, indent + length + 1, width, events)
        events.append(yaml.MappingEndEvent())
    elif isinstance(value, list):
        if width is None:
            flow = not any(isinstance(item, dict) for item in value)
        else:  # a list in a list is never in flow style
            words = [_text(_scalar(item, block=True)) for item in value if not isinstance(item, dict | list)]
            flow = len(words) == len(value) and head + len(f" [{', '.join(words)}]") <= width
        events.append(yaml.SequenceStartEvent(None, None, implicit=True, flow_style=flow))
        for item in value:
            _say(item, indent + 2, _NO_LIMIT, width, events)
        events.append(yaml.SequenceEndEvent())
    else:
        events.append(_scalar(value, block=width is not None))


def _scalar(value: Any, *, block: bool = False) -> yaml.ScalarEvent:
    text, style = str(value), None
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    elif isinstance(value, float):
        # PyYAML reads 1e-05 as text
        text = text if "e" not in text or "." in text else text.replace("e", ".0e")
    elif not isinstance(value, int):
        if block and _is_block(value):
            style = "|"
        elif not _WORD.fullmatch(value) or value.lower() in _RESERVED:
            style = '"'
    return yaml.ScalarEvent(None, None, (True, True), text, style=style)


_key = lru_cache(maxsize=1024, typed=True)(_scalar)  # most stand in a document many times


def _is_block(text: str) -> bool:
    """Whether a literal block says it: several lines, and no blank ones at the end, which would be lost."""
    if "\n" not in text:  # as most
        return False
    lines = text.removesuffix("\n").split("\n")
    return len(lines) > 1 and lines[-1].strip() != "" and _BLOCK.fullmatch(text) is not None


def _text(scalar: yaml.ScalarEvent) -> str:
    """On one line."""
    return _quoted(scalar.value) if scalar.style else str(scalar.value)


def _quoted(text: str) -> str:
    return '"' + _ESCAPED.sub(_escape, text) + '"'


def _escape(match: re.Match[str]) -> str:
    char = match[0]
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class _Dumper(yaml.SafeDumper):
    """Takes every style from its event and decides none by the look of a text."""

    def need_more_events(self) -> bool:
        # The next one says whether a mapping or a list is empty, and nothing else is asked of those to come.
        return not self.events or (
            len(self.events) == 1 and not isinstance(self.events[0], yaml.StreamEndEvent)
        )

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
