"""A store: objects under keys, in a folder or in any S3 bucket. The one interface the rest knows.

Keys are relative and `/`-separated; `..`, empty parts, control characters and absolute keys are refused.
Every call has a deadline and ends; what cannot be reached raises StoreError (infrastructure).
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from mlpipe._core.errors import StoreError

Buffer = bytes | bytearray | memoryview
RESERVED = ".mlpipe-"  # a folder store's own files (temporary, lock) start like this


def check_key(key: str) -> str:
    """The key itself, or StoreError (input) when it could lead out of the store or not be a file name."""
    parts = key.split("/")
    sound = (
        not any(part in ("", ".", "..") or part.startswith(RESERVED) for part in parts)
        and all(len(part.encode("utf-8", "replace")) <= 255 for part in parts)
        and len(key.encode("utf-8", "replace")) <= 1024
        and key.isprintable()
        and "\\" not in key
    )
    if not sound:
        raise StoreError(f"{key!r} is not a key", hint="use relative names joined by '/'", kind="input")
    return key


def check_prefix(prefix: str) -> str:
    """A prefix with its final "/" (or "" for everything), checked like a key."""
    prefix = prefix.rstrip("/")
    return check_key(prefix) + "/" if prefix else ""


class ObjectInfo(NamedTuple):
    """`modified`: Unix seconds."""

    key: str
    size_bytes: int
    modified: float


class LogWriter(Protocol):
    """Append-only lines. A folder loses at most the last line when the process is killed; S3 cannot
    append, so it gets numbered chunks at least every 5 s and on flush."""

    def write(self, data: bytes) -> None:
        """Takes `data`, whole lines, to be stored soon."""

    def flush(self) -> None:
        """What was written is stored when this returns. Raises StoreError."""

    def close(self) -> None:
        """`flush`, and nothing more is written. Raises StoreError."""


class Store(Protocol):
    """Objects under keys like `runs/a/run.json`, in a folder or a bucket. Every call may raise StoreError,
    and has a deadline."""

    url: str
    part_bytes: int | None
    """Bytes above which an object is better cut into several (S3). None: no such limit (a folder)."""

    def put(self, key: str, data: Buffer) -> None:
        """Create or replace, whole or not at all, verified by a checksum on the way."""

    def put_pieces(self, key: str, pieces: Iterable[Buffer], *, crc32c: int | None = None) -> int:
        """`put` of the concatenation, without joining it. Returns its size in bytes. A store with
        `part_bytes` reads `pieces` more than once (give a list) and has the server check `crc32c`."""

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True: written by this call (also when only the reply was lost and our bytes are found there).
        False: something else is there already."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        """Replace only if the object still has `etag`. False: it changed, read again."""

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        """At most `length` bytes from `start` on (fewer at the object's end). Raises StoreError(kind="input")
        with "no such object" when absent."""

    def get_into(self, key: str, buffer: Buffer, *, start: int = 0) -> None:
        """Fill the writable `buffer` from the object's bytes at `start`; short reads raise StoreError."""

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """The object's bytes, and the etag that `put_if_match` compares."""

    def exists(self, key: str) -> bool:
        """Whether there is an object (not a folder) of this key."""

    def list(self, prefix: str, *, recursive: bool = True) -> Iterator[ObjectInfo]:
        """Everything below the folder `prefix` ("": all), sorted by key. Not recursive: only what is right
        under it, with "folders" as keys that end in "/" and have size 0."""

    def delete(self, keys: Sequence[str]) -> None:
        """Absent keys are no error."""

    def copy(self, source: str, target: str) -> None:
        """Within the store, without a round trip through the client where it can."""

    def open_log(self, key: str) -> LogWriter:
        """Goes on with the log `key`, or begins it."""

    def read_log(self, key: str, *, offset: int = 0) -> tuple[bytes, int]:
        """All bytes from `offset` on, and the offset to continue from. Absent: (b"", offset)."""

    def list_logs(self, prefix: str) -> Sequence[str]:
        """Keys of the logs right under `prefix`, sorted (S3 keeps a log as chunks under its key)."""

    def local_path(self, key: str) -> Path | None:
        """The file or folder behind `key` when the store is a folder (to memory-map it), else None."""

    def probe(self) -> None:
        """Writes, reads, and writes conditionally. Raises StoreError saying what does not work; a store
        that ignores conditions is refused."""
