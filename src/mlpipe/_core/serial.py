"""Frozen dataclasses and NamedTuples to JSON and back. What another version wrote is read if it means the
same here: a missing key must have a default, which says "as before"; an unknown key must say nothing (null,
false or empty). All else is an error, since to ignore it would change what is done."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
# Of a field that is written only where it is not its default: what does not use it stays as it was, byte for
# byte.
Sparse = Annotated[T, "sparse"]
_NONE = dataclasses.MISSING
_MOST_DIGITS = 20  # with a sign, of 64 bits


def to_json(value: Any) -> str:
    """Byte-stable: fields in the order of the dataclass, dict keys sorted, two spaces, a final newline."""
    return write_json(to_plain(value))


def write_json(plain: Any) -> str:
    """As `to_json`, of what `to_plain` gave."""
    return json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(cls: type[T], text: str | bytes) -> T:
    """Raises ValueError naming the path of what does not fit."""
    return from_plain(cls, read_json(text))


def read_json(text: str | bytes) -> Any:
    """Raises ValueError for what is no JSON, for numbers that are not finite or beyond 64 bits, and for what
    is nested too deeply to be read."""
    try:
        return json.loads(text, parse_constant=_number, parse_float=_number, parse_int=_whole_number)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number that JSON has")
    return number


def _whole_number(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"{text[:_MOST_DIGITS]}... is too large")
    return int(text)


def to_plain(value: Any) -> Any:
    """Of these, tuples and dicts: dicts and lists that JSON has, in the order of `to_json`."""
    kind: Any = type(value)
    if _is_record(kind):
        silent = _silent(kind)
        return {
            name: to_plain(held)
            for name in _fields(kind)
            if (held := getattr(value, name)) != silent.get(name, _NONE)
        }
    if isinstance(value, dict):
        return {key: to_plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, path: str = "$") -> T:
    """As `from_json`, of what it reads; parts that are instances already stay as they are."""
    result: T = _build(cls, data, path)
    return result


def _build(kind: Any, data: Any, path: str) -> Any:
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return data
    if origin in (Union, types.UnionType):
        options = get_args(kind)
        if data is None and type(None) in options:
            return None
        errors = []
        for option in options:
            if option is not type(None):
                try:
                    return _build(option, data, path)
                except ValueError as error:
                    errors.append(str(error))
        raise ValueError("; ".join(errors))
    if origin is Literal:
        if data not in get_args(kind):
            raise ValueError(f"{path}: {data!r} is not one of {get_args(kind)}")
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise ValueError(f"{path}: expected a list")
        inner = get_args(kind)[0]
        return tuple(_build(inner, item, f"{path}[{i}]") for i, item in enumerate(data))
    if origin in (dict, Mapping):
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object")
        inner = get_args(kind)[1]
        return {key: _build(inner, item, f"{path}.{key}") for key, item in data.items()}
    if isinstance(kind, type) and _is_record(kind):
        if isinstance(data, kind):
            return data
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object")
        hints = _hints(kind)
        fields = _fields(kind)
        missing = [name for name, default in fields.items() if default is _NONE and name not in data]
        unknown = [key for key in data if key not in fields and not _says_nothing(data[key])]
        if missing or unknown:
            odd = [*(f"{name} is missing" for name in missing), *(f"{key} is unknown" for key in unknown)]
            raise ValueError(f"{path}: keys do not fit {kind.__name__}: {', '.join(odd)}")
        return kind(
            **{name: _build(hints[name], data[name], f"{path}.{name}") for name in fields if name in data}
        )
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"{path}: expected {kind.__name__}, got {data!r}")
    return data


_hints = functools.cache(get_type_hints)  # a plan has dozens: 14 ms of each rank's start


def _is_record(kind: type) -> bool:
    """Whether it is a dataclass, or a NamedTuple, which takes a tenth of the time of a dataclass to make."""
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """By name the default, `_NONE` for what has to be there."""
    if not dataclasses.is_dataclass(kind):
        return {name: kind._field_defaults.get(name, _NONE) for name in kind._fields}
    return {
        f.name: f.default if f.default_factory is _NONE else f.default_factory
        for f in dataclasses.fields(kind)
    }


@functools.cache
def _silent(kind: Any) -> dict[str, Any]:
    """Of the fields that are `Sparse` the defaults."""
    hints = get_type_hints(kind, include_extras=True)
    sparse = [name for name, hint in hints.items() if "sparse" in getattr(hint, "__metadata__", ())]
    return {name: _fields(kind)[name] for name in sparse}


def _says_nothing(value: Any) -> bool:
    """Zero is a value: a port, say."""
    return value is None or value is False or value in ([], {})


def differing_keys(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Paths at which two JSON documents differ, like `stages.train.train.steps`: an item of a list goes by
    its `name` if it has one, else by its index."""
    ours, theirs = _named(ours), _named(theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = [*ours, *(key for key in theirs if key not in ours)]
        paths_of_keys = [
            differing_keys(ours.get(key), theirs.get(key), f"{at}.{key}" if at else str(key)) for key in keys
        ]
        return [path for paths in paths_of_keys for path in paths]
    return [] if type(ours) is type(theirs) and ours == theirs else [at]


def _named(value: Any) -> Any:
    if not isinstance(value, list) or not any(isinstance(item, dict) for item in value):
        return value
    return {
        str(item.get("name", index)) if isinstance(item, dict) else str(index): item
        for index, item in enumerate(value)
    }


def leaves(value: Any, at: str = "") -> dict[str, Any]:
    """The values of a JSON document by path, as `differing_keys` names them; a list without objects is one
    value."""
    value = _named(value)
    if not isinstance(value, dict):
        return {at: value}
    by_path: dict[str, Any] = {}
    for key, item in value.items():
        by_path |= leaves(item, f"{at}.{key}" if at else str(key))
    return by_path
