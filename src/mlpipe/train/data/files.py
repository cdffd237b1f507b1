"""Files of samples, in a folder or in a bucket: found by a path or a pattern, and read in parts."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from glob import glob
from pathlib import Path, PurePosixPath

from mlpipe._core.errors import StoreError, TrainError
from mlpipe.store.open import open_store
from mlpipe.store.outputs import cache_folder
from mlpipe.train.data.shard_cache import CachedFile, ShardCache
from mlpipe.train.data.tokens import BUCKET

_MAGIC = "*?["


@dataclass(frozen=True)
class DataFile:
    """`name`: below the folder or bucket in which it was found. `path`: None of one in a bucket."""

    name: str
    size_bytes: int
    modified: float
    path: Path | None = None

    def part(self, start: int = 0, size_bytes: int | None = None) -> CachedFile:
        """Some of its bytes, as the cache knows them."""
        size = self.size_bytes if size_bytes is None else size_bytes
        told = f"{self.name}\0{self.size_bytes}\0{self.modified}\0{start}\0{size}"
        return CachedFile(self.name, size, hashlib.sha256(told.encode()).hexdigest(), start, verified=False)


def base_of(path: str) -> tuple[str, str | None]:
    """Of `path` the folder, as a path or URL, and below it the pattern; None: it is the folder itself, as far
    as its name tells."""
    head, _, last = path.rstrip("/").rpartition("/")
    parts = path.removeprefix(BUCKET).rstrip("/").split("/")
    first = next((i for i, part in enumerate(parts) if any(sign in part for sign in _MAGIC)), None)
    if first is None:
        in_folder = PurePosixPath(last).suffix == "" or (not is_remote(path) and Path(path).is_dir())
        return (path.rstrip("/") or "/", None) if in_folder else (head or ".", last)
    start = BUCKET if is_remote(path) else ""
    return start + ("/".join(parts[:first]) or ("/" if path.startswith("/") else ".")), "/".join(
        parts[first:]
    )


def is_remote(path: str) -> bool:
    """Whether it lies in a bucket."""
    return path.startswith(BUCKET)


def find_files(path: str, suffix: str) -> tuple[str, list[DataFile]]:
    """The folder, and its files by name: those of a pattern, or of a folder all that end in `suffix`. Raises
    TrainError (input) where there are none; StoreError."""
    base, pattern = base_of(path)
    chosen = _in_bucket(base, pattern, suffix) if is_remote(path) else _in_folder(base, pattern, suffix)
    if not chosen:
        raise TrainError(
            f"there are no {suffix} files here" if pattern is None else "there is no such file",
            where=path,
            hint="write a file, a folder or a pattern like data/train-*" + suffix,
            kind="input",
        )
    return base, chosen


def matches(name: str, pattern: str | None, suffix: str) -> bool:
    """Stars of a pattern stay within a folder, `**` goes through all of them."""
    if pattern is None:
        return name.endswith(suffix)
    return _matches(name.split("/"), pattern.split("/"))


def _matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(names[i:], patterns[1:]) for i in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], patterns[0]) and _matches(names[1:], patterns[1:])


def _in_folder(base: str, pattern: str | None, suffix: str) -> list[DataFile]:
    names = glob(pattern or f"**/*{suffix}", root_dir=base, recursive=True)
    paths = [(name, path) for name in sorted(set(names)) if (path := Path(base, name)).is_file()]
    return [DataFile(name, path.stat().st_size, path.stat().st_mtime, path) for name, path in paths]


def _in_bucket(base: str, pattern: str | None, suffix: str) -> list[DataFile]:
    items = [item for item in open_store(base).list("") if matches(item.key, pattern, suffix)]
    return [DataFile(item.key, item.size_bytes, item.modified) for item in items]


def cache_of(base: str, limit_bytes: int) -> ShardCache:
    """Of a bucket's files or their parts, for the processes of the node."""
    folder = cache_folder() / "files" / hashlib.sha256(base.encode()).hexdigest()[:32]
    return ShardCache(base, folder, limit_bytes)


class RangeFile(io.RawIOBase):
    """An object of a bucket to be read at any place: what lies in `copy` (from its byte `start` on) from the
    disk, all else by requests."""

    def __init__(self, url: str, file: DataFile, copy: Path | None = None, start: int = 0) -> None:
        self.file = file
        self.store = open_store(url)
        self.start = start
        self.copy = copy.read_bytes() if copy is not None else b""
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def size(self) -> int:
        """In bytes, as pyarrow asks for it."""
        return self.file.size_bytes

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.size_bytes}[whence]
        self.position = origin + offset
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.file.size_bytes - self.position)
        count = left if size is None or size < 0 else min(size, left)
        begin = self.position - self.start
        if begin >= 0 and begin + count <= len(self.copy):
            data = self.copy[begin : begin + count]
        else:
            data = self.store.get(self.file.name, start=self.position, length=count) if count else b""
            if len(data) != count:  # who reads has room for these
                raise StoreError(
                    f"{len(data)} bytes came of {count} from byte {self.position} on",
                    where=f"{self.store.url.rstrip('/')}/{self.file.name}",
                    hint="it has changed since it was listed, or the server gives other bytes than asked for",
                )
        self.position += len(data)
        return data
