"""Reads what W&B's own package writes offline (`run-*.wandb`): LevelDB's log format behind a header of 7
bytes, with a protobuf of W&B in each record."""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HEADER_BYTES, _BLOCK_BYTES, _RECORD_BYTES = 7, 2**15, 7
_FULL, _LAST = 1, 4


def records(path: Path) -> Iterator[Any]:
    """Messages `wandb_internal_pb2.Record`, in the order written."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    data, at, whole = path.read_bytes(), _HEADER_BYTES, b""
    while at + _RECORD_BYTES <= len(data):
        if (left := _BLOCK_BYTES - at % _BLOCK_BYTES) < _RECORD_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        at += _RECORD_BYTES
        whole += data[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            record = messages.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def rows(path: Path) -> list[dict[str, Any]]:
    """What was logged, by key."""
    found = [one.history for one in records(path) if one.WhichOneof("record_type") == "history"]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.item}
        for one in found
    ]


def told(path: Path) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The run, its settings, and its summary."""
    run: Any = None
    summary: dict[str, Any] = {}
    for one in records(path):
        kind = one.WhichOneof("record_type")
        if kind == "run":
            run = one.run
        elif kind == "summary":
            summary |= {item.key: json.loads(item.value_json) for item in one.summary.update if item.key}
    assert run is not None
    return run, {item.key: json.loads(item.value_json) for item in run.config.update}, summary
