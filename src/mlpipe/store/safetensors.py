"""Tensors in the format safetensors (huggingface/safetensors, README "Format"), as they lie in a store: a
header of JSON says where each begins, so that any part is read without the rest, and nothing is code.

A file is 8 bytes with the length of the header, little-endian, the header, and the tensors, row-major:

    {"__metadata__": {...}, name: {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]}, ...}

A set of files has an index beside it, `model.safetensors.index.json`: {"weight_map": {name: file}}.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store.base import ObjectInfo, Store
from mlpipe.store.checksum import BLOCK_BYTES
from mlpipe.store.manifest import DTYPE_BYTES, Blob, Chunk, Tensor

SUFFIX = ".safetensors"
INDEX = ".safetensors.index.json"
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
HOW_TO_CONVERT = (
    "write it as safetensors where you trust it: safetensors.torch.save_file(torch.load(FILE, "
    "weights_only=True), 'model.safetensors')"
)
DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F16": "float16", "BF16": "bfloat16", "I16": "int16", "U16": "uint16", "F32": "float32", "I32": "int32",
    "U32": "uint32", "F64": "float64", "I64": "int64", "U64": "uint64", "C64": "complex64",
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # what the format's own reader takes
_MAX_INDEX_BYTES = 100_000_000
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"  # how torch.save begins a file, today and before


def split(place: str) -> tuple[str, str]:
    """A path or an `s3://` URL as the URL of a store and a key in it, `""` for all of that store: a file's
    folder and its name, or a folder."""
    if place.endswith((SUFFIX, INDEX)):
        folder, _, name = place.rpartition("/")
        return folder or ("/" if place.startswith("/") else "."), name
    return place.rstrip("/") or "/", ""


def find(store: Store, name: str) -> list[ObjectInfo]:
    """The files that `name` stands for: one, those that it lists as an index, or, of `""`, what lies in the
    store's uppermost folder. Raises StoreError (input) when there are none."""
    there = {info.key: info for info in store.list("", recursive=False) if not info.key.endswith("/")}
    if not name:
        name = _chosen(store, there)
    if name not in there:
        raise StoreError("no such file", where=f"{store.url}/{name}", kind="input")
    if not name.endswith(INDEX):
        return [there[name]]
    files = _listed(store.get(name, length=_MAX_INDEX_BYTES + 1), f"{store.url}/{name}")
    if missing := [file for file in files if file not in there]:
        raise StoreError(
            f"it lists {missing[0]}, which is not there ({len(missing)} of {len(files)} are missing)",
            where=f"{store.url}/{name}",
            hint="copy all files of the set",
            kind="input",
        )
    return [there[file] for file in files]


def _chosen(store: Store, there: Iterable[str]) -> str:
    for suffix in (INDEX, SUFFIX):
        matches = [key for key in there if key.endswith(suffix)]
        if len(matches) > 1 and f"model{suffix}" in matches:
            matches = [f"model{suffix}"]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise StoreError(
                f"several sets of weights: {', '.join(matches[:5])}",
                where=store.url,
                hint="name one of these files",
                kind="input",
            )
    if pickles := [key for key in there if key.endswith(PICKLES)]:
        raise StoreError(
            f"{pickles[0]} is a pickle, which runs the code that it holds: mlpipe reads none",
            where=store.url,
            hint=HOW_TO_CONVERT,
            kind="input",
        )
    raise StoreError(
        f"no *{SUFFIX} is there", where=store.url, hint="name the file, or its folder", kind="input"
    )


def _listed(data: bytes, where: str) -> list[str]:
    """The files of an index, each a name without a folder."""
    try:
        named = sorted({str(file) for file in json.loads(data)["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise DamagedError("not an index of safetensors", where=where, kind="input") from None
    if not named or any(PurePosixPath(file).name != file or not file.endswith(SUFFIX) for file in named):
        raise DamagedError("an index of files that do not lie beside it", where=where, kind="input")
    return named


class Headers(NamedTuple):
    """Tensors and blobs as in a manifest, the blobs without checksums. `digest`: of names, sizes, times of
    change and headers, of all but the values; `files`: the same of each by itself, behind its name."""

    tensors: dict[str, Tensor]
    blobs: list[Blob]
    digest: str
    files: tuple[str, ...]


def read_headers(store: Store, files: Iterable[ObjectInfo]) -> Headers:
    """Raises StoreError (input) for what is not safetensors."""
    tensors: dict[str, Tensor] = {}
    blobs: list[Blob] = []
    digest, each = hashlib.sha256(), []
    for info in files:
        header, begin = _header(store, info)
        told = f"{info.key}\0{info.size_bytes}\0{info.modified}\0".encode() + header
        digest.update(told)
        each.append(f"{info.key} {hashlib.sha256(told).hexdigest()[:16]}")
        where = f"{store.url}/{info.key}"
        for name, tensor in _described(header, begin, info.size_bytes, where).items():
            if name in tensors:
                raise DamagedError(f"{name} stands in two files", where=where, kind="input")
            tensor["chunks"][0]["blob"] = len(blobs)
            tensors[name] = tensor
        blobs.append(
            Blob(key=info.key, size_bytes=info.size_bytes, block_bytes=BLOCK_BYTES, crc32c=[], part_bytes=0)
        )
    return Headers(tensors, blobs, digest.hexdigest(), tuple(each))


def _header(store: Store, info: ObjectInfo) -> tuple[bytes, int]:
    """The JSON, and where the tensors begin."""
    where = f"{store.url}/{info.key}"
    first = store.get(info.key, length=8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= min(_MAX_HEADER_BYTES, info.size_bytes - 8):
        if first.startswith((_ZIP, _PICKLE)):
            raise StoreError(
                "a pickle, whatever its name says, which runs the code that it holds: mlpipe reads none",
                where=where,
                hint=HOW_TO_CONVERT,
                kind="input",
            )
        raise DamagedError("not a file of safetensors, or cut off", where=where, kind="input")
    return store.get(info.key, start=8, length=length), 8 + length


def _described(header: bytes, begin: int, size_bytes: int, where: str) -> dict[str, Tensor]:
    try:
        entries: dict[str, Any] = json.loads(header)
        entries.pop("__metadata__", None)
        return {name: _tensor(entry, begin, size_bytes) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise DamagedError(
            f"not a file of safetensors, or cut off: {error}", where=where, kind="input"
        ) from None


def _tensor(entry: dict[str, Any], begin: int, size_bytes: int) -> Tensor:
    """Raises ValueError for what cannot be."""
    dtype = DTYPES.get(entry["dtype"], str(entry["dtype"]))
    shape = [int(size) for size in entry["shape"]]
    first, last = (begin + int(offset) for offset in entry["data_offsets"])
    itemsize = DTYPE_BYTES.get(dtype)
    if min(shape, default=0) < 0 or not begin <= first <= last <= size_bytes:
        raise ValueError("a tensor reaches out of its file")
    if itemsize is not None and last - first != math.prod(shape) * itemsize:
        raise ValueError("a tensor has another size than its shape")
    chunk = Chunk(offset=[0] * len(shape), shape=shape, blob=0, byte_offset=first)
    return Tensor(dtype=dtype, shape=shape, chunks=[chunk])
