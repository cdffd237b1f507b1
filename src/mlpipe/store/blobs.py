"""Streams of bytes in the store, of any size: written once, summed block by block, read back verified.

A folder holds a blob as one file. S3 gets objects of 64 MiB, each an ordinary PUT of its own that the server
verifies: no multipart upload of ours can ever be left behind, and a lost reply costs one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe.store.base import Buffer, Store
from mlpipe.store.checksum import BLOCK_BYTES, BlockSums, combine, crc32c
from mlpipe.store.manifest import Blob, part_objects

_NUM_THREADS = 4


def write_blob(store: Store, key: str, chunks: Iterable[Buffer], *, block_bytes: int = BLOCK_BYTES) -> Blob:
    """Streams `chunks` to `key`. A chunk is not copied: it must stay as it is until this returns. At most
    `_NUM_THREADS` + 1 parts are asked from `chunks` ahead of what is stored."""
    if store.part_bytes is None:
        sums = BlockSums(block_bytes)
        size_bytes = store.put_pieces(key, sums.watch(chunks))
        return Blob(key=key, size_bytes=size_bytes, block_bytes=block_bytes, crc32c=sums.sums, part_bytes=0)
    part_bytes = max(store.part_bytes // block_bytes, 1) * block_bytes
    all_sums: list[int] = []
    size_bytes = 0
    running: list[Future[int]] = []
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="blob") as pool:
        try:
            for index, part in enumerate(_parts(chunks, part_bytes)):
                sums = BlockSums(block_bytes)
                pieces = list(sums.watch(part))
                total = combine(sums.sums, sums.size_bytes, block_bytes)
                all_sums += sums.sums
                size_bytes += sums.size_bytes
                if len(running) >= _NUM_THREADS:
                    running.pop(0).result()
                name = f"{key}/p{index:05d}"
                running.append(pool.submit(store.put_pieces, name, pieces, crc32c=total))
            for upload in running:
                upload.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return Blob(
        key=key, size_bytes=size_bytes, block_bytes=block_bytes, crc32c=all_sums, part_bytes=part_bytes
    )


def _parts(chunks: Iterable[Buffer], part_bytes: int) -> Iterator[list[memoryview]]:
    """Lists of views that make up `part_bytes` each, the last fewer; one empty part for no bytes at all."""
    part: list[memoryview] = []
    room = part_bytes
    first = True
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while len(view):
            part.append(view[:room])
            view = view[room:]
            room -= len(part[-1])
            if not room:
                yield part
                part, room, first = [], part_bytes, False
    if part or first:
        yield part


def read_blob(store: Store, blob: Blob, start: int, buffer: Buffer) -> None:
    """Fills the writable `buffer` with the blob's bytes from `start` on. Every block that covers them is read
    whole and verified; DamagedError names the key and block that is corrupt or missing."""
    view = memoryview(buffer).cast("B")
    end = start + len(view)
    if start < 0 or end > blob["size_bytes"]:
        raise StoreError(f"bytes {start} to {end} are not within it", where=blob["key"])
    if not len(view):
        return
    block_bytes = blob["block_bytes"]
    indices = range(start // block_bytes, (end - 1) // block_bytes + 1)

    def read_one(index: int) -> None:
        block_start = index * block_bytes
        block_end = min(block_start + block_bytes, blob["size_bytes"])
        low, high = max(start, block_start), min(end, block_end)
        target = view[low - start : high - start]
        if (low, high) == (block_start, block_end):
            _read_block(store, blob, index, target)
        else:
            whole = memoryview(bytearray(block_end - block_start))
            _read_block(store, blob, index, whole)
            target[:] = whole[low - block_start : high - block_start]

    if store.part_bytes is None or len(indices) == 1:
        for index in indices:
            read_one(index)
    else:
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="blob") as pool:
            for _ in pool.map(read_one, indices):
                pass


def _read_block(store: Store, blob: Blob, index: int, target: memoryview) -> None:
    start = index * blob["block_bytes"]
    key = blob["key"]
    if blob["part_bytes"]:
        part, start = divmod(start, blob["part_bytes"])
        key = f"{key}/p{part:05d}"
    try:
        store.get_into(key, target, start=start)
    except StoreError as error:
        if error.kind != "input":
            raise
        raise DamagedError("is missing", where=key) from error
    if crc32c(target) != blob["crc32c"][index]:
        raise DamagedError(f"block {index} is corrupt: its checksum does not fit", where=key)


def missing_objects(blob: Blob, sizes: dict[str, int]) -> list[str]:
    """What is absent or of another size than the blob says, in words. `sizes`: from a LIST."""
    problems = []
    for key, size in part_objects(blob):
        if key not in sizes:
            problems.append(f"{key}: is missing")
        elif sizes[key] != size:
            problems.append(f"{key}: has {sizes[key]} bytes, {size} were written")
    return problems
