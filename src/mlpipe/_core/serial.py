"""Frozen dataclasses to JSON and back, strictly: an unknown or missing key is an error, not a default."""

from __future__ import annotations

import dataclasses
import json
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def to_json(value: Any) -> str:
    """Byte-stable: fields in the order of the dataclass, dict keys sorted, two spaces, a final newline."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def from_json(cls: type[T], text: str | bytes) -> T:
    """Raises ValueError naming the path of what does not fit."""
    return from_plain(cls, json.loads(text))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(value[key]) for key in sorted(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, path: str = "$") -> T:
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
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object")
        inner = get_args(kind)[1]
        return {key: _build(inner, item, f"{path}.{key}") for key, item in data.items()}
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object")
        hints = get_type_hints(kind)
        fields = {f.name for f in dataclasses.fields(kind)}
        if data.keys() != fields:
            odd = ", ".join(sorted(data.keys() ^ fields))
            raise ValueError(f"{path}: keys do not fit {kind.__name__}: {odd}")
        return kind(**{name: _build(hints[name], data[name], f"{path}.{name}") for name in data})
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        raise ValueError(f"{path}: expected {kind.__name__}, got {data!r}")
    return data
