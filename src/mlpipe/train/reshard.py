"""Loading a checkpoint into whatever shards this rank owns, whoever wrote it under whichever strategy.

Each shard is intersected with the chunks of the manifest; what is needed is read block by block (16 MiB,
the unit of the checksums), each block once, verified before a byte of it is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from mlpipe._core.errors import TrainError
from mlpipe.store import catalogue
from mlpipe.store.base import Buffer, Store
from mlpipe.store.manifest import Blob, Manifest, Tensor
from mlpipe.train.shards import LocalShard

_READERS = 4


@dataclass
class _Piece:
    """`length` bytes of a blob from `start` on that go to `target` (flat, uint8, on the CPU)."""

    start: int
    target: np.ndarray


def load(store: Store, key: str, manifest: Manifest, tensors: list[LocalShard]) -> None:
    """Fills every `local` of `tensors` from the committed checkpoint under `key`.

    Raises TrainError(kind="input") if the checkpoint is not of this model, StoreError if it is damaged.
    """
    described = [(item, _described(manifest, item, key)) for item in tensors if item.local.numel()]
    fill(store, manifest["blobs"], described, catalogue.read_blob)


def fill(
    store: Store,
    blobs: list[Blob],
    described: list[tuple[LocalShard, Tensor]],
    read: Callable[[Store, Blob, int, Buffer], None],
) -> None:
    """Fills every `local`, of which some value is wanted, from the chunks of its tensor, which has its dtype
    and shape; `read` as `read_blob`. Raises StoreError if they are damaged."""
    pieces: dict[int, list[_Piece]] = defaultdict(list)
    late: list[tuple[torch.Tensor, torch.Tensor]] = []
    for item, tensor in described:
        _collect(item, tensor, pieces, late)
    tasks = [
        (blobs[index], block, parts)
        for index, wanted in pieces.items()
        for block, parts in _by_block(wanted, blobs[index]["block_bytes"]).items()
    ]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="load") as readers:
        for _ in readers.map(lambda task: _read_block(store, read, *task), tasks):
            pass
    with torch.no_grad():
        for target, source in late:
            target.copy_(source)


def _described(manifest: Manifest, item: LocalShard, key: str) -> Tensor:
    tensor = manifest["tensors"].get(item.name)
    dtype = str(item.local.dtype).removeprefix("torch.")
    if tensor is None or tensor["dtype"] != dtype or tuple(tensor["shape"]) != item.shape:
        has = f"{tensor['dtype']}{tensor['shape']}" if tensor else "no such tensor"
        raise TrainError(
            f"the checkpoint does not fit the model: {item.name} is {dtype}{list(item.shape)} here, "
            f"{has} there",
            where=key,
            hint="resume with the model that wrote it, or start a new run",
            kind="input",
        )
    return tensor


def _collect(
    item: LocalShard,
    described: Tensor,
    pieces: dict[int, list[_Piece]],
    late: list[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """The pieces that cover the shard `item`. A chunk's rows along dim 0 are contiguous bytes; when the shard
    cuts other dims too, the rows are read to a buffer and cut out `late`r."""
    local = item.local.detach()
    itemsize = local.element_size()
    covered = 0
    for chunk in described["chunks"]:
        low = [max(a, b) for a, b in zip(item.offset, chunk["offset"], strict=True)]
        high = [
            min(a + n, b + m)
            for a, n, b, m in zip(item.offset, local.shape, chunk["offset"], chunk["shape"], strict=True)
        ]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            continue
        region = local
        for dim, (a, b) in enumerate(zip(low, high, strict=True)):
            region = region.narrow(dim, a - item.offset[dim], b - a)
        covered += region.numel()
        row_bytes = int(np.prod(chunk["shape"][1:], dtype=np.int64)) * itemsize
        first, last = (low[0] - chunk["offset"][0], high[0] - chunk["offset"][0]) if low else (0, 1)
        rows_shape = [last - first, *chunk["shape"][1:]] if low else []
        whole_rows = list(region.shape) == rows_shape
        if whole_rows and region.is_contiguous() and local.device.type == "cpu":
            buffer = region
        else:
            buffer = torch.empty(rows_shape, dtype=local.dtype)
            source = buffer
            for dim in range(1, len(low)):
                source = source.narrow(dim, low[dim] - chunk["offset"][dim], high[dim] - low[dim])
            late.append((region, source))
        flat = buffer.reshape(-1).view(torch.uint8).numpy()
        pieces[chunk["blob"]].append(_Piece(chunk["byte_offset"] + first * row_bytes, flat))
    if covered != local.numel():
        raise TrainError(
            f"the checkpoint has {covered} of the {local.numel()} values of {item.name} that are needed here",
            kind="infrastructure",
        )


def _by_block(pieces: list[_Piece], block_bytes: int) -> dict[int, list[_Piece]]:
    """The pieces cut at block boundaries, by block."""
    blocks: dict[int, list[_Piece]] = defaultdict(list)
    for piece in pieces:
        start, end = piece.start, piece.start + piece.target.nbytes
        while start < end:
            block = start // block_bytes
            stop = min(end, (block + 1) * block_bytes)
            blocks[block].append(_Piece(start, piece.target[start - piece.start : stop - piece.start]))
            start = stop
    return dict(sorted(blocks.items()))


def _read_block(
    store: Store,
    read: Callable[[Store, Blob, int, Buffer], None],
    blob: Blob,
    block: int,
    pieces: list[_Piece],
) -> None:
    start = block * blob["block_bytes"]
    buffer = np.empty(min(blob["block_bytes"], blob["size_bytes"] - start), dtype=np.uint8)
    read(store, blob, start, buffer.data)
    for piece in pieces:
        at = piece.start - start
        piece.target[:] = buffer[at : at + piece.target.nbytes]
