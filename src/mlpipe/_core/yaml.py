"""Plain data to YAML that every YAML 1.1 and 1.2 parser reads alike, byte for byte the same each time: text
is quoted unless it is a plain word that nobody takes for something else.

Every style is decided here, by rules that no library's emitter has (PyYAML's, bent to them, took nine times
as long for the same bytes). The sha256 of a pipeline in this form says which pipeline a run is of, so a
changed byte would estrange a pipeline from its former runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mlpipe._core.errors import RenderError

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([-./][A-Za-z0-9_]+)*")
_RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}
_BLOCK = re.compile(
    r"[!-~][ -~\n]*"
)  # printable ASCII; an indented first line would be taken for indentation
_ESCAPED = re.compile(r"[^ !#-\[\]-~]")
_MAX_KEY = 1000  # YAML 1.2, 7.4: a key on one line has at most 1024 characters
_WIDTH = 100


def to_yaml(data: dict[str, Any]) -> str:
    """In block style, keys in the given order, a text on one line; lists without mappings in flow style."""
    return _document(data, None)


def documents(objects: Iterable[dict[str, Any]]) -> str:
    """One document an object, as people review them: long text such as plan.json stands as a block of lines,
    and a list in flow style only if it fits its line. Raises RenderError for what YAML cannot say."""
    return "".join(f"---\n{_document(data, _WIDTH)}" for data in objects)


def _document(data: dict[str, Any], width: int | None) -> str:
    """`width`: of a line; None: see `to_yaml`."""
    return "\n".join(_block(data, "", width)) + "\n" if data else "{}\n"


def _block(value: dict[str, Any] | list[Any], pad: str, width: int | None) -> Iterator[str]:
    """Lines of what is not empty; `pad`: what its keys or dashes are indented by."""
    if isinstance(value, dict):
        for key, item in value.items():
            name = _flow(key)
            if width is not None and len(name) > _MAX_KEY:
                raise RenderError(
                    f"a key of {len(key)} characters: {key[:40]!r}...", hint="write a shorter one"
                )
            yield from _entry(f"{pad}{name}:", item, pad, width)
        return
    for item in value:
        if isinstance(item, dict) and item:  # its first key stands beside the dash
            first, *rest = _block(item, f"{pad}  ", width)
            yield f"{pad}- {first.lstrip(' ')}"
            yield from rest
        else:
            yield from _entry(f"{pad}-", item, pad, width)


def _entry(head: str, value: Any, pad: str, width: int | None) -> Iterator[str]:
    """`head`: a key or a dash, which `value` stands beside or below."""
    if width is not None and isinstance(value, str) and _is_literal(value):
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        yield from (f"{pad}  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    elif _stands_beside(head, value, width):
        yield f"{head} {_flow(value)}"
    else:
        yield head
        yield from _block(value, f"{pad}  ", width)


def _stands_beside(head: str, value: Any, width: int | None) -> bool:
    if not value or not isinstance(value, dict | list):
        return True
    if width is None:
        return isinstance(value, list) and not any(isinstance(item, dict) for item in value)
    # a list in a list is never in flow style where lines have a width
    flat = (
        isinstance(value, list)
        and head.endswith(":")
        and not any(isinstance(item, dict | list) for item in value)
    )
    return flat and len(f"{head} {_flow(value)}") <= width


def _flow(value: Any) -> str:
    """On one line."""
    if isinstance(value, str):
        word = _WORD.fullmatch(value) and value.lower() not in _RESERVED
        return value if word else f'"{_ESCAPED.sub(_escape, value)}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    text = "null" if value is None else str(value)
    if isinstance(value, float):
        # PyYAML reads 1e-05 as text
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    return text.lower()


def _escape(found: re.Match[str]) -> str:
    char, code = found[0], ord(found[0])
    if char in '"\\':
        return "\\" + char
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_literal(text: str) -> bool:
    """Whether a literal block says it: several lines, and no blank ones at the end, which would be lost."""
    lines = text.removesuffix("\n").split("\n")
    return len(lines) > 1 and lines[-1].strip() != "" and _BLOCK.fullmatch(text) is not None
