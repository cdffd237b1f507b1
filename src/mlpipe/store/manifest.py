"""The manifest of a checkpoint: what it holds, and why it can be believed.

It may come from a bucket that others can write, so it is plain JSON, bounded in size, carries its own CRC32C,
and is checked before use: types, that every blob lies under the manifest's own prefix, that every chunk lies
inside its tensor and its blob, and that chunks tile their tensor. Nothing is ever unpickled.

    {"format": 1, "step": int, "attempt": int, "uuid": str, "time": Unix seconds,
     "code": {...}, "scalars": {...},
     "tensors": {name: {"dtype": "float32", "shape": [..],
                        "chunks": [{"offset": [..], "shape": [..], "blob": index, "byte_offset": int}]}},
     "blobs": [Blob, ...],
     "lineage": {...}}                                     only in the registry
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NotRequired, TypedDict, TypeVar, cast

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store.base import check_key
from mlpipe.store.checksum import crc32c

MANIFEST = "MANIFEST.json"
FORMAT = 1
MAX_BYTES = 256 * 2**20
MAX_BLOCK_BYTES = 64 * 2**20
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2,
    "float32": 4, "int32": 4, "uint32": 4, "complex64": 8,
    "float64": 8, "int64": 8, "uint64": 8, "complex128": 16,
}  # fmt: skip

T = TypeVar("T")


class Blob(TypedDict):
    """One stream of bytes in the store. `crc32c`: one for every `block_bytes`, the last block shorter.
    `part_bytes` 0: the object `key`. Otherwise it is cut: objects `<key>/p00000`, `<key>/p00001`, ... of
    `part_bytes` each (a multiple of `block_bytes`), the last shorter."""

    key: str
    size_bytes: int
    block_bytes: int
    crc32c: list[int]
    part_bytes: int


class Chunk(TypedDict):
    """A box of a tensor, row-major, at `byte_offset` of blob number `blob`."""

    offset: list[int]
    shape: list[int]
    blob: int
    byte_offset: int


class Tensor(TypedDict):
    """One tensor of the model or the optimizer: its global shape, and where its pieces lie."""

    dtype: str
    shape: list[int]
    chunks: list[Chunk]


class Manifest(TypedDict):
    """MANIFEST.json of a checkpoint, whose presence is the commit (docs/adr/0002)."""

    format: int
    step: int
    attempt: int
    uuid: str
    time: float
    code: dict[str, Any]
    scalars: dict[str, Any]
    tensors: dict[str, Tensor]
    blobs: list[Blob]
    lineage: NotRequired[dict[str, Any]]


def part_objects(blob: Blob) -> list[tuple[str, int]]:
    """(key, size in bytes) of each object that the blob is made of."""
    if not blob["part_bytes"]:
        return [(blob["key"], blob["size_bytes"])]
    size, part = blob["size_bytes"], blob["part_bytes"]
    return [
        (f"{blob['key']}/p{index:05d}", min(part, size - start))
        for index, start in enumerate(range(0, max(size, 1), part))
    ]


_HEAD = b'{"crc32c":"%08x","manifest":'
_HEAD_BYTES = len(_HEAD % 0)


def add_checksum(body: object) -> bytes:
    """JSON with its own CRC32C: `{"crc32c":"...","manifest":<body>}`. Raises ValueError for what JSON cannot
    hold (NaN, tensors)."""
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()
    return _HEAD % crc32c(text) + text + b"}\n"


def strip_checksum(data: bytes, where: str) -> Any:
    """The body that `add_checksum` was given. Raises DamagedError: torn, altered, too large or not JSON."""
    if len(data) > MAX_BYTES:
        raise DamagedError(f"larger than {MAX_BYTES} bytes", where=where)
    text = data[_HEAD_BYTES:-2]
    if data[:_HEAD_BYTES] != _HEAD % crc32c(text) or data[-2:] != b"}\n":
        raise DamagedError("corrupt: its checksum does not fit", where=where)
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"not JSON: {error}", where=where) from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def check(manifest: Any, prefix: str, where: str) -> Manifest:
    """The manifest itself, typed. Raises DamagedError: the first thing in it that cannot be believed."""
    try:
        _check_manifest(manifest, prefix.rstrip("/") + "/")
    except UnsoundError as error:
        raise DamagedError(
            f"not a sound manifest: {error}", where=where, hint="it was altered or written by another program"
        ) from None
    return cast(Manifest, manifest)


class UnsoundError(Exception):
    """What in a manifest cannot be believed. `check` and `outputs` turn it into a StoreError."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise UnsoundError(message)


def _field(owner: Any, name: str, kind: type[T], what: str) -> T:
    _need(isinstance(owner, dict), f"{what} is not an object")
    value = owner.get(name)
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UnsoundError(f"{what}: {name!r} is not {kind.__name__}")
    return value


def _count(owner: Any, name: str, what: str) -> int:
    value = _field(owner, name, int, what)
    _need(0 <= value < 2**63, f"{what}: {name!r} is out of range")
    return value


def _counts(owner: Any, name: str, what: str, length: int | None = None) -> list[int]:
    values = _field(owner, name, list, what)
    for value in values:
        sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        _need(sound, f"{what}: {name!r} is not a list of sizes")
    _need(length is None or len(values) == length, f"{what}: {name!r} has the wrong length")
    return values


def _check_manifest(manifest: Any, prefix: str) -> None:
    _need(_count(manifest, "format", "manifest") == FORMAT, f"its format is not {FORMAT}")
    _count(manifest, "step", "manifest")
    _count(manifest, "attempt", "manifest")
    _field(manifest, "uuid", str, "manifest")
    _need(isinstance(manifest.get("time"), (int, float)), "manifest: 'time' is not a number")
    for name in ("code", "scalars", *(["lineage"] if "lineage" in manifest else [])):
        _field(manifest, name, dict, "manifest")
    blobs = _field(manifest, "blobs", list, "manifest")
    seen: set[str] = set()
    for index, blob in enumerate(blobs):
        check_blob(blob, prefix, f"blob {index}")
        _need(blob["key"] not in seen, f"blob {index}: its key stands twice")
        seen.add(blob["key"])
    for name, tensor in _field(manifest, "tensors", dict, "manifest").items():
        _check_tensor(tensor, blobs, f"tensor {name!r}")


def check_blob(blob: Any, prefix: str, what: str) -> None:
    """Raises UnsoundError when the blob is malformed or lies outside `prefix` (which ends in "/")."""
    key = _field(blob, "key", str, what)
    _need(key.startswith(prefix) and key != prefix + MANIFEST, f"{what}: {key!r} is not under {prefix!r}")
    try:
        check_key(key)
    except StoreError:
        raise UnsoundError(f"{what}: {key!r} is not a key") from None
    size = _count(blob, "size_bytes", what)
    block = _count(blob, "block_bytes", what)
    part = _count(blob, "part_bytes", what)
    _need(0 < block <= MAX_BLOCK_BYTES, f"{what}: 'block_bytes' is out of range")
    _need(part % block == 0 and size <= (part or size) * 100_000, f"{what}: 'part_bytes' does not fit")
    sums = _counts(blob, "crc32c", what, math.ceil(size / block) if size < 2**53 else -1)
    _need(all(value < 2**32 for value in sums), f"{what}: 'crc32c' is out of range")


def _check_tensor(tensor: Any, blobs: list[Any], what: str) -> None:
    dtype = _field(tensor, "dtype", str, what)
    _need(dtype in DTYPE_BYTES, f"{what}: unknown dtype {dtype!r}")
    shape = _counts(tensor, "shape", what)
    boxes = []
    for chunk in _field(tensor, "chunks", list, what):
        offset = _counts(chunk, "offset", what, len(shape))
        extent = _counts(chunk, "shape", what, len(shape))
        inside = all(start + length <= dim for start, length, dim in zip(offset, extent, shape, strict=True))
        _need(inside, f"{what}: a chunk reaches out of its shape")
        index = _count(chunk, "blob", what)
        _need(index < len(blobs), f"{what}: there is no blob {index}")
        end = _count(chunk, "byte_offset", what) + math.prod(extent) * DTYPE_BYTES[dtype]
        _need(end <= blobs[index]["size_bytes"], f"{what}: a chunk reaches out of its blob")
        if math.prod(extent):
            boxes.append((tuple(offset), tuple(extent)))
    _need(_tiles(boxes, shape), f"{what}: its chunks do not tile it")


def _tiles(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: Sequence[int]) -> bool:
    """Whether the boxes are the cells of a grid over `shape`, each once (as sharding over a mesh makes)."""
    if not math.prod(shape):
        return not boxes
    cells = 1
    for dim, size in enumerate(shape):
        cuts = sorted({(offset[dim], extent[dim]) for offset, extent in boxes})
        end = 0
        for start, length in cuts:
            if start != end:
                return False
            end += length
        if end != size:
            return False
        cells *= len(cuts)
    return len(boxes) == cells and len({offset for offset, _ in boxes}) == cells
