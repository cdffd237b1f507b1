"""Records to lines and back: see `records.py`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from mlpipe._core.records import EVENTS, OF_A_RANK, SCHEMA_VERSION, Record, Start, Unknown

_R = TypeVar("_R", bound=Record)
# JSON writes 1.0 as 1, and some writers do.
_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,), "float": (float, int), "MaybeNan": (float, int), "str": (str,), "bool": (bool,),
    "list[str]": (list,), "list[int]": (list,), "dict[str, int]": (dict,), "dict[str, float]": (dict,),
}  # fmt: skip


_MOST = sys.float_info.max
_LAST_SECOND = 2.0**40  # Unix seconds of a time; calendars go on for longer


class _Schema:
    """How a line of one kind is read, made once out of its class."""

    def __init__(self, kind: type[Record]) -> None:
        declared = {item.name: str(item.type).removesuffix(" | None") for item in fields(kind)}
        self.types = {name: _TYPES[text] for name, text in declared.items()}
        self.nan = [name for name, text in declared.items() if text == "MaybeNan"]
        self.items = {name: text for name, text in declared.items() if text.endswith("]")}
        bare = [one for one in fields(kind) if one.default is MISSING and one.default_factory is MISSING]
        self.absent = {one.name: None for one in bare if str(one.type).endswith(" | None")}
        self.required = ["time", *(one.name for one in bare if one.name not in self.absent)]


_KINDS = {kind.kind: kind for kind in OF_A_RANK + EVENTS}
_SCHEMAS: dict[type[Record], _Schema] = {kind: _Schema(kind) for kind in OF_A_RANK + EVENTS}
_SCHEMAS[Record] = _Schema(Record)


def own_fields(record: Record) -> dict[str, Any]:
    """What records of its kind say, without what all records say."""
    common = _SCHEMAS[Record].types
    return {name: value for name, value in record.values().items() if name not in common}


def encode(record: Record) -> bytes:
    """One line with its newline. Floats that are not finite become null: JSON has none. What is None by
    default is left out."""
    absent = _SCHEMAS[type(record)].absent
    known = {name: value for name, value in record.values().items() if value is not None or name in absent}
    line = {"v": SCHEMA_VERSION, "kind": record.kind, **known}
    try:
        text = json.dumps(line, allow_nan=False)
    except ValueError:
        text = json.dumps({name: _finite(value) for name, value in line.items()})
    return text.encode() + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def decode_line(line: bytes) -> Record | None:
    """None for a torn or foreign line. A whole record behind a torn one (of a writer that was killed, whose
    successor went on in the same file) is found."""
    for start in (0, line.rfind(b'{"v":')):
        try:
            value = json.loads(line[start:])
        except (ValueError, RecursionError):
            continue
        if (record := parse(value)) is not None:
            return record
    return None


def parse(value: Any) -> Record | None:
    """A parsed line as the record of its kind; None for a foreign one, or one without what it must have."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return None
    kind = _KINDS.get(value["kind"])
    try:
        if kind is not None:
            return read_fields(kind, value)
        known = read_fields(Record, value)
        return Unknown(**known.values(), kind_name=value["kind"], line=value)
    except KeyError:
        return None


def read_fields(kind: type[_R], line: Mapping[str, Any]) -> _R:
    """A record out of those fields of `line` that have their types. Raises KeyError when one is missing
    without which it says nothing: the time; of a step, its number."""
    schema = _SCHEMAS[kind]
    types = schema.types
    known = {
        name: value
        for name, value in line.items()
        if name in types
        and (of := type(value)) in types[name]
        and ((of is not float and of is not int) or -_MOST <= value <= _MOST)  # not 1e999
    }
    for name in schema.required:
        known[name]
    if not 0 <= known["time"] < _LAST_SECOND:
        raise KeyError("time")
    for name in schema.nan:
        if name in line and line[name] is None:
            known[name] = math.nan
    for name, declared in schema.items.items():
        if name in known and not _is_plain(known[name], declared):
            del known[name]
        elif name in known and declared == "dict[str, float]":
            known[name] = {key: math.nan if item is None else item for key, item in known[name].items()}
    return kind(**{**schema.absent, **known})


def _is_countable(value: Any) -> bool:
    return type(value) not in (int, float) or -_MOST <= value <= _MOST


def _is_plain(value: Any, declared: str) -> bool:
    if declared.startswith("list"):
        kind = str if declared == "list[str]" else int
        return all(type(item) is kind and _is_countable(item) for item in value)
    kinds = (int,) if declared == "dict[str, int]" else (int, float, type(None))
    return all(type(item) in kinds and _is_countable(item) for item in value.values())


# In place of a start record that is not there.
NOT_STARTED = read_fields(Start, {"time": 0.0})
