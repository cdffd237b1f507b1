"""Tensors out of a store, streamed into files of safetensors (huggingface/safetensors, README "Format"), for
which that has no writer of its own. Without torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from mlpipe._core.errors import TrainError
from mlpipe.store import safetensors
from mlpipe.store.base import Buffer, Store
from mlpipe.store.catalogue import read_blob
from mlpipe.store.manifest import DTYPE_BYTES, Blob, Tensor

SHARD_BYTES = 5_000_000_000  # what the Hub's tools cut at
_CACHED_BLOCKS = 32  # of 16 MiB: small tensors share a block, and sharded ones have one in each blob
_DTYPES = {ours: theirs for theirs, ours in safetensors.DTYPES.items()}

Reader = Callable[
    [str, Tensor], memoryview
]  # of a tensor by its name in the file: all of its bytes, row-major
ReadBlob = Callable[[Store, Blob, int, Buffer], None]


def write_weights(folder: Path, tensors: dict[str, Tensor], read: Reader, shard_bytes: int) -> None:
    """model.safetensors; or several with an index, where they pass `shard_bytes`."""
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(folder / "model.safetensors", tensors, read)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, {name: tensors[name] for name in names}, read)
        weight_map |= dict.fromkeys(names, file)
    total = sum(_num_bytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def _shards(tensors: dict[str, Tensor], shard_bytes: int) -> list[list[str]]:
    """Names in order, cut before `shard_bytes` are passed (a larger tensor stands alone)."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + _num_bytes(tensor) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += _num_bytes(tensor)
    return shards


def _num_bytes(tensor: Tensor) -> int:
    return math.prod(tensor["shape"]) * DTYPE_BYTES[tensor["dtype"]]


def write_file(path: Path, tensors: dict[str, Tensor], read: Reader) -> None:
    """One file of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _num_bytes(tensor)
        dtype = _DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise TrainError(f"safetensors knows no {tensor['dtype']}", where=name, kind="input")
        header[name] = {"dtype": dtype, "shape": tensor["shape"], "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            file.write(read(name, tensor))
        file.flush()
        os.fsync(file.fileno())


def reader(store: Store, blobs: list[Blob], read: ReadBlob | None = None) -> Reader:
    """Of tensors in `store`; what is smaller than a block comes out of the last blocks read. `read`: not
    `read_blob`, where there are no checksums."""
    cached = _cached_reader(store, read or read_blob)
    return lambda name, tensor: _assemble(tensor, blobs, cached)


def _assemble(tensor: Tensor, blobs: list[Blob], read: Callable[[Blob, int, memoryview], None]) -> memoryview:
    """The whole tensor's bytes, row-major, out of its chunks."""
    item = np.dtype(f"V{DTYPE_BYTES[tensor['dtype']]}")
    whole = np.empty(tensor["shape"], dtype=item)
    for chunk in tensor["chunks"]:
        box = np.empty(chunk["shape"], dtype=item)
        read(blobs[chunk["blob"]], chunk["byte_offset"], _bytes_of(box))
        where = tuple(slice(o, o + n) for o, n in zip(chunk["offset"], chunk["shape"], strict=True))
        whole[where] = box
    return _bytes_of(whole)


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _cached_reader(store: Store, read_bytes: ReadBlob) -> Callable[[Blob, int, memoryview], None]:
    blobs: dict[str, Blob] = {}

    @lru_cache(maxsize=_CACHED_BLOCKS)
    def block(key: str, index: int) -> memoryview:
        start = index * blobs[key]["block_bytes"]
        data = memoryview(bytearray(min(blobs[key]["block_bytes"], blobs[key]["size_bytes"] - start)))
        read_bytes(store, blobs[key], start, data)
        return data

    def read(blob: Blob, start: int, buffer: memoryview) -> None:
        size = blob["block_bytes"]
        if len(buffer) >= size:
            read_bytes(store, blob, start, buffer)
            return
        blobs[blob["key"]] = blob
        filled = 0
        while filled < len(buffer):
            index, offset = divmod(start + filled, size)
            part = block(blob["key"], index)[offset : offset + len(buffer) - filled]
            buffer[filled : filled + len(part)] = part
            filled += len(part)

    return read


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As `transformers` writes it."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
