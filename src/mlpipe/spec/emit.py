"""Plain data to YAML that every YAML 1.1 and 1.2 parser reads alike: text is quoted unless it is a plain
word that nobody takes for something else."""

from __future__ import annotations

import re
from typing import Any

_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([-./][A-Za-z0-9_]+)*")
_RESERVED = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}


def to_yaml(data: Any) -> str:
    """Block style, keys in the given order, two spaces, a final newline."""
    lines: list[str] = []
    _emit(data, 0, lines)
    return "\n".join(lines) + "\n"


def _emit(data: Any, indent: int, lines: list[str]) -> None:
    pad = "  " * indent
    if isinstance(data, dict):
        for key, value in data.items():
            _item(f"{pad}{scalar(key)}:", value, indent, lines)
        return
    for value in data:
        if isinstance(value, dict) and value:
            start = len(lines)
            _emit(value, indent + 1, lines)
            lines[start] = f"{pad}- {lines[start].lstrip()}"
        else:
            _item(f"{pad}-", value, indent, lines)


def _item(head: str, value: Any, indent: int, lines: list[str]) -> None:
    nested = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value))
    if value and nested:
        lines.append(head)
        _emit(value, indent + 1, lines)
    else:
        lines.append(f"{head} {_flow(value)}")


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{scalar(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return scalar(value)


def scalar(value: Any) -> str:
    """Text, number, boolean or None on one line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        # PyYAML reads 1e-05 as text
        return text if "e" not in text or "." in text else text.replace("e", ".0e")
    if _WORD.fullmatch(value) and value.lower() not in _RESERVED:
        return str(value)
    return '"' + "".join(map(_escape, value)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    code = ord(char)
    if 0x20 <= code < 0x7F:
        return char
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
