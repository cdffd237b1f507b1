"""Files of a bucket on this node's disk: each fetched once for all ranks of the node, verified, and the least
recently used ones deleted before there are more than so many bytes."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mlpipe._core.errors import DamagedError, StoreError, TrainError
from mlpipe._core.files import locked
from mlpipe._core.units import format_bytes
from mlpipe.store.base import Store
from mlpipe.store.open import open_store

_FETCH_SECONDS = 3600.0
_PIECE_BYTES = 16 * 2**20
_AT_ONCE = 4
_PARTIAL = ".partial-"
_TRIES = 3
Opened = TypeVar("Opened")


@dataclass(frozen=True)
class CachedFile:
    """Of the bucket: what it holds is known by its digest, so that the cache never shows another one.

    `start`: of a part of an object, its first byte. `verified` False: nobody has said what its SHA-256 is,
    and `sha256` is that of what else tells it from others: name, size and time of the object, and the part.
    """

    name: str
    size_bytes: int
    sha256: str
    start: int = 0
    verified: bool = True


def check_room(files: list[CachedFile], window: int, limit_bytes: int, *, where: str, smaller: str) -> None:
    """For two windows of so many of the files, the one that is read and the one that is fetched meanwhile.
    Raises TrainError (input); `smaller`: what to do instead of a larger cache."""
    needed = 2 * sum(sorted((file.size_bytes for file in files), reverse=True)[:window])
    if needed > limit_bytes:
        raise TrainError(
            f"two windows of {window} files are {format_bytes(needed)}, "
            f"the cache has {format_bytes(limit_bytes)}",
            where=where,
            hint=f"write a larger data.cache, or {smaller}",
            kind="input",
        )


class ShardCache:
    """`url`: of the folder in the bucket. `folder`: for copies of it, shared by the processes of the node;
    `limit_bytes`: of all of them together."""

    def __init__(self, url: str, folder: Path, limit_bytes: int) -> None:
        self.url = url
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._process = 0
        self._coming: dict[str, Future[Path]] = {}

    def get(self, file: CachedFile) -> Path:
        """A path of it here, which stays until others have been used since. Raises StoreError."""
        self._begin()
        coming = self._coming.pop(file.sha256, None)
        if coming is not None:
            with suppress(StoreError):  # tried again, in which it shows what is still wrong
                coming.result()
        return self._fetch(file)  # at once, unless it was deleted since it came

    def opened(self, file: CachedFile, open_it: Callable[[Path], Opened]) -> Opened:
        """What `open_it` makes of its path here; tried again where another rank has just made room. Raises
        StoreError, FileNotFoundError."""
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                return open_it(self.get(file))
        return open_it(self.get(file))

    def expect(self, files: list[CachedFile]) -> None:
        """They will be asked for soon: fetched meanwhile. What goes wrong shows when they are."""
        self._begin()
        for file in files:
            if file.sha256 not in self._coming:
                self._coming[file.sha256] = self._threads.submit(self._fetch, file)

    def _begin(self) -> None:
        """Connections and threads do not outlive a fork."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._coming.clear()
            self._store: Store = open_store(self.url)
            self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="shards")

    def _fetch(self, file: CachedFile) -> Path:
        path = self.folder / file.sha256
        if path.exists():
            with suppress(OSError):
                _use(path)
            return path
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked(f".{file.sha256[:16]}.lock", unless=path):
                if not path.exists():
                    self._download(file, path)
        except OSError as error:
            raise StoreError(
                f"cannot keep {file.name}: {error.strerror}",
                where=str(self.folder),
                hint="free some space there, or let MLPIPE_CACHE name another folder",
            ) from error
        return path

    def _download(self, file: CachedFile, path: Path) -> None:
        partial = path.with_name(f"{_PARTIAL}{secrets.token_hex(4)}")
        try:
            with partial.open("xb") as output:
                with self._locked(".room.lock"):
                    self._make_room(file.size_bytes)
                    os.truncate(output.fileno(), file.size_bytes)  # counts from now on
                digest = hashlib.sha256()
                for start in range(0, file.size_bytes, _PIECE_BYTES):
                    piece = bytearray(min(_PIECE_BYTES, file.size_bytes - start))
                    self._store.get_into(file.name, piece, start=file.start + start)
                    digest.update(piece)
                    output.write(piece)
            if file.verified and digest.hexdigest() != file.sha256:
                raise DamagedError(
                    "its bytes are not those of the manifest",
                    where=f"{self.url}/{file.name}",
                    hint="upload the folder anew, its manifest last",
                )
            with self._locked(".room.lock"):  # who counts meets it under one name
                _use(partial)
                partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def _make_room(self, size_bytes: int) -> None:
        """A file that another process has mapped stays readable for it. What processes that were killed have
        left goes first."""
        kept = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # of one that another process has just deleted
                stat = path.stat()
                if path.name.startswith(_PARTIAL) and stat.st_mtime < time.time() - _FETCH_SECONDS:
                    path.unlink()
                elif not path.name.startswith(".") or path.name.startswith(_PARTIAL):
                    kept.append((stat.st_mtime_ns, stat.st_size, path))
        used = sum(size for _, size, _ in kept)
        for _, size, path in sorted(kept):
            if used + size_bytes <= self.limit_bytes:
                return
            if not path.name.startswith(_PARTIAL):
                path.unlink(missing_ok=True)
                used -= size

    def _locked(self, name: str, unless: Path | None = None) -> AbstractContextManager[None]:
        return locked(self.folder / name, _FETCH_SECONDS, "been fetching this", unless=unless)


def _use(path: Path) -> None:
    """By a clock that tells two uses apart: a kernel's own times are those of its last tick."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))
