"""Logs on S3, which cannot append: numbered chunks `<key>/c000001`, `<key>/c000002`, ...

The last chunk is replaced by a longer one until it is full, so a day of one flush in 5 s is a few hundred
objects, not 17,000. A chunk's number is claimed by a conditional PUT: a restarted writer starts a chunk of
its own. The offset of `read_log` counts the bytes of all chunks in order.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

from mlpipe._core.errors import StoreError
from mlpipe.store.base import ObjectInfo, Store

FLUSH_SECONDS = 5.0
_FULL_BYTES = 256 * 2**10
_MAX_PENDING_BYTES = 64 * 2**20
_CHUNK = re.compile(r"(.*)/c([0-9]{6,})")


def chunks_of(store: Store, key: str) -> Sequence[ObjectInfo]:
    """The log's chunks in order."""
    chunks = [info for info in store.list(key, recursive=False) if _CHUNK.fullmatch(info.key)]
    return sorted(chunks, key=lambda info: _number(info.key))


def logs_in(store: Store, prefix: str) -> Sequence[str]:
    """Keys of the logs right under `prefix`."""
    depth = prefix.rstrip("/").count("/") + 1
    matches = (_CHUNK.fullmatch(info.key) for info in store.list(prefix))
    return sorted({match[1] for match in matches if match and match[1].count("/") == depth})


def _number(key: str) -> int:
    return int(key.rpartition("/c")[2])


class S3LogWriter:
    """Writes go to memory; a thread stores them every `FLUSH_SECONDS`. While the store is away they wait
    there; `flush` and `close` say so with StoreError."""

    def __init__(self, store: Store, key: str) -> None:
        self._store = store
        self._key = key
        self._pending = bytearray()  # not stored yet
        self._chunk = b""  # content of the open chunk, as stored
        self._number: int | None = None  # of the open chunk
        self._lock = threading.Lock()  # over _pending
        self._flushing = threading.Lock()  # over the chunk
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"log {key}", daemon=True)
        self._thread.start()

    def write(self, data: bytes) -> None:
        """Raises StoreError when the store has been away for so long that memory is full."""
        with self._lock:
            if len(self._pending) + len(data) > _MAX_PENDING_BYTES:
                raise StoreError("the store is away and the log's memory is full", where=self._key)
            self._pending += data

    def flush(self) -> None:
        """Stores what was written so far. Raises StoreError; then it waits in memory."""
        with self._flushing:
            with self._lock:
                data = bytes(self._pending)
            if data:
                self._store_chunk(data)
                with self._lock:
                    del self._pending[: len(data)]

    def close(self) -> None:
        """`flush`, for the last time. Raises StoreError."""
        if not self._closed.is_set():
            self._closed.set()
            self.flush()

    def _run(self) -> None:
        while not self._closed.wait(FLUSH_SECONDS):
            try:
                self.flush()
            except StoreError:
                continue  # kept in memory; the next round tries again, close reports it

    def _store_chunk(self, data: bytes) -> None:
        if self._number is not None and len(self._chunk) < _FULL_BYTES:
            grown = self._chunk + data
            self._store.put(f"{self._key}/c{self._number:06d}", grown)
            self._chunk = grown
            return
        number = self._number
        if number is None:
            number = max((_number(info.key) for info in chunks_of(self._store, self._key)), default=0)
        number += 1
        while not self._store.put_if_absent(f"{self._key}/c{number:06d}", data):
            number += 1
        self._number, self._chunk = number, data
