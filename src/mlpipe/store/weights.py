"""Weights that a training may start from, wherever they lie: in a checkpoint, in a model of the registry, or
in files of safetensors. What is here reads no values; `read` does, any bytes of any blob."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mlpipe._core.adapters import is_adapter
from mlpipe._core.errors import StoreError
from mlpipe.store import safetensors
from mlpipe.store.base import Buffer, Store
from mlpipe.store.blobs import read_blob
from mlpipe.store.manifest import MANIFEST, MAX_BYTES, Blob, Tensor, check, strip_checksum

PREFIX = "model."  # of the tensors of a checkpoint that are weights


@dataclass(frozen=True)
class Weights:
    """`tensors`: by the names of the module that had them; two names of one tied parameter have one Tensor.
    `digest`: changes when they change; `files`: of files the name of each, and a digest of its own.
    `read(store, blob, start, buffer)`: as `read_blob`. `where`: for messages."""

    store: Store
    tensors: dict[str, Tensor]
    blobs: list[Blob]
    read: Callable[[Store, Blob, int, Buffer], None]
    digest: str
    where: str
    files: tuple[str, ...] = ()


def of_checkpoint(store: Store, key: str) -> Weights:
    """Of a checkpoint or a promoted model. Raises StoreError (input) when it is gone, DamagedError."""
    where = f"{key}/{MANIFEST}"
    data = store.get(where, length=MAX_BYTES + 1)
    manifest = check(strip_checksum(data, where), key, where)
    tensors = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in manifest["tensors"].items()
        if name.startswith(PREFIX)
    }
    if not tensors:
        raise StoreError("the checkpoint holds no model", where=key, kind="input")
    _refuse_adapters(tensors, where)
    for name, stored in (manifest["scalars"].get("tied") or {}).items():
        tensors[name.removeprefix(PREFIX)] = tensors[stored.removeprefix(PREFIX)]
    digest = hashlib.sha256(data).hexdigest()
    return Weights(store, tensors, manifest["blobs"], read_blob, digest, f"{store.url}/{key}")


def of_files(store: Store, name: str) -> Weights:
    """Of safetensors: the file `name`, the set that it lists as an index, or the one in the folder. Raises
    StoreError (input) for what is not there or no such file."""
    files = safetensors.find(store, name)
    tensors, blobs, digest, each = safetensors.read_headers(store, files)
    where = f"{store.url}/{name}" if name else store.url
    _refuse_adapters((one.removesuffix(".weight") for one in tensors), where)
    return Weights(store, tensors, blobs, _read_plain, digest, where, each)


def _refuse_adapters(names: Iterable[str], where: str) -> None:
    if any(map(is_adapter, names)):
        raise StoreError(
            "these are adapters, without the weights that they stand beside",
            where=where,
            hint="start from both: mlpipe checkpoints export RUN --merged --out FOLDER, then that folder",
            kind="input",
        )


def _read_plain(store: Store, blob: Blob, start: int, buffer: Buffer) -> None:
    """Safetensors have no checksums."""
    store.get_into(blob["key"], buffer, start=start)
