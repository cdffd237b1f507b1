"""A store in a folder, local or on a shared file system with atomic rename, hard links and flock.

A write is a temporary file in the target's own folder, fsync, rename, fsync of the folder: whole or not at
all, also over a power cut. Temporary files and locks start with `.mlpipe-`; they are never listed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mlpipe._core.errors import StoreError
from mlpipe._core.files import check_name, is_open_as, locked
from mlpipe.store.base import RESERVED, Buffer, LogWriter, ObjectInfo, check_key, check_prefix

_TEMPORARY = f"{RESERVED}tmp-"
_LOCK = f"{RESERVED}lock"
_READ_BYTES = 8 * 2**20
_LOCK_DEADLINE_SECONDS = 30.0

_MEANINGS = {
    errno.ENOSPC: ("no space left on the device", "free some space, or prune checkpoints"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or prune checkpoints"),
    errno.EFBIG: ("the file would be larger than is allowed", "raise the file size limit (ulimit -f)"),
    errno.EROFS: ("the file system is read-only", "choose a folder that can be written"),
    errno.EACCES: ("permission denied", "check the owner and mode of the store's folder"),
    errno.EPERM: ("operation not permitted", "the file system must allow writes and hard links"),
    errno.ENOTDIR: ("a file stands where a folder is needed", None),
    errno.EISDIR: ("a folder stands where an object is needed", None),
    errno.ELOOP: ("symbolic links in a circle, or one where a log is written", "remove it"),
    errno.ENAMETOOLONG: ("the name is too long", None),
    errno.EOPNOTSUPP: ("the file system lacks an operation", "it must have hard links and flock"),
    errno.EIO: ("input/output error", "the disk or the network file system is failing"),
    errno.ESTALE: ("stale file handle", "the network file system was remounted"),
}


@contextlib.contextmanager
def _in_words(where: Path | str, *, writing: bool = False) -> Iterator[None]:
    """What the operating system refuses becomes one StoreError that says what and where. `writing`: folders
    are made as they are needed, so that one which is not there was taken away meanwhile."""
    try:
        yield
    except FileNotFoundError as error:
        if writing:
            message = "somebody deleted the folder while it was written into"
            raise StoreError(message, where=str(where), hint="was the store deleted?") from error
        raise StoreError("no such object", where=str(where), kind="input") from error
    except OSError as error:
        message, hint = _MEANINGS.get(error.errno or 0, (error.strerror or str(error), None))
        raise StoreError(message, where=str(where), hint=hint) from error


class FolderStore:
    """See `Store`. `root` is created by the first write."""

    part_bytes: int | None = None

    def __init__(self, root: Path) -> None:
        root = root.absolute()
        if ".." in root.parts:  # one name for one folder, as the links in it lead
            root = Path(os.path.realpath(root))
        self.root = root
        self.url = check_name(str(root))

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    # writing

    def put(self, key: str, data: Buffer) -> None:
        self.put_pieces(key, [data])

    def put_pieces(self, key: str, pieces: Iterable[Buffer], *, crc32c: int | None = None) -> int:
        path = self._path(key)
        with _in_words(path, writing=True):
            return _write(path, pieces, lambda temporary: os.replace(temporary, path))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        with _in_words(path, writing=True):
            try:
                _write(path, [data], lambda temporary: os.link(temporary, path))
            except FileExistsError:
                return False
        return True

    def put_if_match(self, key: str, data: bytes, etag: str) -> bool:
        path = self._path(key)
        if not path.parent.is_dir():
            return False
        lock = locked(path.parent / _LOCK, _LOCK_DEADLINE_SECONDS, "held this lock")
        with _in_words(path, writing=True), contextlib.ExitStack() as held:
            try:
                held.enter_context(lock)
                found = _etag(path.read_bytes())
            except FileNotFoundError:  # it, or with it its folder
                found = None
            if found == etag:
                _write(path, [data], lambda temporary: os.replace(temporary, path))
        if found is None and path.parent != self.root:
            _remove_empty(path.parent)  # who deleted the last object left the lock to us
        return found == etag

    def copy(self, source: str, target: str) -> None:
        with _in_words(self._path(source)), self._path(source).open("rb") as file:
            self.put_pieces(target, iter(lambda: file.read(_READ_BYTES), b""))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            with _in_words(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                path.unlink()
            for folder in path.parents:  # S3 has no empty folders either
                if folder == self.root or not _remove_empty(folder):
                    break

    # reading

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes:
        path = self._path(key)
        with _in_words(path), path.open("rb") as file:
            file.seek(start)
            return file.read(-1 if length is None else length)

    def get_into(self, key: str, buffer: Buffer, *, start: int = 0) -> None:
        path = self._path(key)
        view = memoryview(buffer).cast("B")
        filled = 0
        with _in_words(path), path.open("rb", buffering=0) as file:
            file.seek(start)
            while filled < len(view):
                count = file.readinto(view[filled : filled + 2**30])
                if not count:
                    raise StoreError(
                        f"ends at byte {start + filled}, {start + len(view)} were expected", where=str(path)
                    )
                filled += count

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        data = self.get(key)
        return data, _etag(data)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list(self, prefix: str, *, recursive: bool = True) -> Iterator[ObjectInfo]:
        prefix = check_prefix(prefix)
        with _in_words(self.root / prefix):
            yield from _walk(self.root / prefix, prefix, recursive)

    def local_path(self, key: str) -> Path | None:
        return self._path(key)

    # logs

    def open_log(self, key: str) -> LogWriter:
        path = self._path(key)
        with _in_words(path, writing=True):
            # not through a link: others may write into a store, and would choose a file of ours
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            return _FolderLog(path, _open(path, flags))

    def read_log(self, key: str, *, offset: int = 0) -> tuple[bytes, int]:
        if not self.exists(key):
            return b"", offset
        data = self.get(key, start=offset)
        return data, offset + len(data)

    def list_logs(self, prefix: str) -> Sequence[str]:
        return [info.key for info in self.list(prefix, recursive=False) if not info.key.endswith("/")]

    # keeping house

    def probe(self) -> None:
        key = f"probe/{secrets.token_hex(8)}"
        try:
            if not self.put_if_absent(key, b"1") or self.put_if_absent(key, b"2"):
                raise StoreError(
                    "the file system ignores conditions (link does not refuse an existing name)",
                    where=self.url,
                    hint="choose a file system with hard links",
                )
            data, etag = self.get_with_etag(key)
            if (
                data != b"1"
                or self.put_if_match(key, b"3", "stale")
                or not self.put_if_match(key, b"3", etag)
            ):
                raise StoreError("the file system does not read back what was written", where=self.url)
        finally:
            self.delete([key])

    def sweep(self, prefix: str, *, older_than_seconds: float) -> int:
        """Drops temporary files below `prefix` that writers who were killed left. Returns how many."""
        swept = 0
        before = time.time() - older_than_seconds
        for folder, _, names in os.walk(self.root / check_prefix(prefix)):
            for name in names:
                path = Path(folder, name)
                if name.startswith(_TEMPORARY):
                    with _in_words(path), contextlib.suppress(FileNotFoundError):
                        if path.stat().st_mtime <= before:
                            path.unlink()
                            swept += 1
        return swept


class _FolderLog:
    """Every write goes to the kernel at once: a killed process loses nothing that `write` returned for."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    def write(self, data: bytes) -> None:
        with _in_words(self._path):
            _write_all(self._fd, data)

    def flush(self) -> None:
        """Nothing is buffered here."""

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            with _in_words(self._path):
                os.close(fd)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _open(path: Path, flags: int) -> int:
    """Opens with the folders above made; again when a deleter took an empty folder away in between."""
    for _ in range(100):
        with contextlib.suppress(FileNotFoundError):
            _make_folders(path.parent)
            return os.open(path, flags | os.O_CLOEXEC, 0o666)
    return os.open(path, flags | os.O_CLOEXEC, 0o666)


def _make_folders(folder: Path) -> None:
    """Each as durable as what will be written into it."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder)
    with contextlib.suppress(PermissionError):  # above the store's root: may be entered, but not read
        _sync_folder(folder.parent)


def _write(path: Path, pieces: Iterable[Buffer], publish: Callable[[Path], None]) -> int:
    """Pieces into a temporary file beside `path`, made durable, then `publish`ed. Returns its size."""
    temporary = path.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
    fd = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    size_bytes = 0
    try:
        try:
            for piece in pieces:
                size_bytes += _write_all(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        publish(temporary)
        _sync_folder(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return size_bytes


def _write_all(fd: int, data: Buffer) -> int:
    view = memoryview(data).cast("B")
    done = 0
    while done < len(view):
        done += os.write(fd, view[done : done + 2**30])
    return done


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_empty(folder: Path) -> bool:
    """A lock alone does not keep it, unless somebody has it."""
    with contextlib.suppress(OSError):
        folder.rmdir()
        return True
    if not _has_only_a_lock(folder):
        return False
    with contextlib.suppress(OSError), (folder / _LOCK).open("r+b") as lock:  # for NFS
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_open_as(lock.fileno(), folder / _LOCK) and _has_only_a_lock(folder):
            (folder / _LOCK).unlink()
            folder.rmdir()
            return True
    return False


def _has_only_a_lock(folder: Path) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        return all(entry.name == _LOCK for entry in listing)
    return False


def _walk(folder: Path, prefix: str, recursive: bool) -> Iterator[ObjectInfo]:
    try:
        with os.scandir(folder) as listing:
            entries = [(entry, entry.is_dir()) for entry in listing if not entry.name.startswith(RESERVED)]
    except (FileNotFoundError, NotADirectoryError):
        return
    # "a.b" sorts before "a/b", as in S3
    for entry, is_folder in sorted(entries, key=lambda pair: pair[0].name + "/" * pair[1]):
        key = prefix + entry.name
        if not is_folder:
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat()
                yield ObjectInfo(key, info.st_size, info.st_mtime)
        elif recursive:
            yield from _walk(Path(entry.path), key + "/", recursive)
        else:
            yield ObjectInfo(key + "/", 0, 0.0)
