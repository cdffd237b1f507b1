"""Kubernetes objects to YAML that people review and every parser reads alike, byte for byte the same each
time. Long text of several lines, such as plan.json, stands as a block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from mlpipe._core.errors import RenderError
from mlpipe.spec.emit import scalar

_ASCII = re.compile(r"[ -~\n]*")
_MAX_KEY = 1000  # YAML 1.2, 7.4: a key on one line has at most 1024 characters
_WIDTH = 100


def to_yaml(objects: Iterable[dict[str, Any]]) -> str:
    """One document an object, keys in the given order. Raises RenderError for what YAML cannot say."""
    return "".join("---\n" + "\n".join(_mapping(found, 0)) + "\n" for found in objects)


def _mapping(data: dict[str, Any], indent: int) -> Iterator[str]:
    for key, value in data.items():
        text = scalar(key)
        if len(text) > _MAX_KEY:
            raise RenderError(f"a key of {len(key)} characters: {key[:40]!r}...", hint="write a shorter one")
        yield from _entry(f"{'  ' * indent}{text}:", value, indent)


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, dict) and value:
        yield head
        yield from _mapping(value, indent + 1)
    elif isinstance(value, list) and value:
        flow = f"{head} [{', '.join(map(scalar, value))}]" if _short(value) else ""
        if flow and len(flow) <= _WIDTH:
            yield flow
        else:
            yield head
            for item in value:
                yield from _item(item, indent + 1)
    else:
        yield from _leaf(head, value, indent)


def _item(item: Any, indent: int) -> Iterator[str]:
    pad = "  " * indent
    if isinstance(item, dict) and item:
        for number, line in enumerate(_mapping(item, indent + 1)):
            yield f"{pad}- {line[len(pad) + 2 :]}" if number == 0 else line
    elif isinstance(item, list) and item:
        yield f"{pad}-"
        for inner in item:
            yield from _item(inner, indent + 1)
    else:
        yield from _leaf(f"{pad}-", item, indent)


def _leaf(head: str, value: Any, indent: int) -> Iterator[str]:
    if isinstance(value, dict | list):
        yield f"{head} {'{}' if isinstance(value, dict) else '[]'}"
    elif isinstance(value, str) and _is_block(value):
        yield f"{head} |{'' if value.endswith(chr(10)) else '-'}"
        pad = "  " * (indent + 1)
        for line in value.removesuffix("\n").split("\n"):
            yield f"{pad}{line}" if line else ""
    else:
        yield f"{head} {scalar(value)}"


def _short(value: list[Any]) -> bool:
    return all(item is None or isinstance(item, str | int | float | bool) for item in value)


def _is_block(text: str) -> bool:
    """Whether a literal block says it: printable ASCII, the first line not indented (the indentation would
    be read from it), and no blank lines at the end (they would be dropped)."""
    lines = text.removesuffix("\n").split("\n")
    return (
        len(lines) > 1
        and lines[0][:1].strip() != ""
        and lines[-1].strip() != ""
        and _ASCII.fullmatch(text) is not None
    )
