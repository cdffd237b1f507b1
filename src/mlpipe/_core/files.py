"""Names that records can hold, files that others read while they are written, and locks."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mlpipe._core.errors import MlpipeError, StoreError

_LOOK_SECONDS = 0.005
PIPE_SECONDS = 60.0  # for what comes out of a pipe, all of it


def check_name(path: str) -> str:
    """`path`, unless no record could hold it: bytes that are not UTF-8, in its name or to this Python. Raises
    MlpipeError (input)."""
    try:
        path.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        foreign = encoding != "utf-8"
        shown = os.fsencode(path).decode("utf-8", "backslashreplace")
        raise MlpipeError(
            f"this Python reads names of files as {encoding}" if foreign else "its name is not UTF-8",
            where=shown,
            hint="set LC_ALL=C.UTF-8, or PYTHONUTF8=1" if foreign else "rename the folder",
            kind="input",
        ) from None
    return path


def home_folder() -> Path:
    """For a user who has none, as a number that a container was given, it is / as containers have it."""
    home = os.path.expanduser("~")
    return Path(home if os.path.isabs(home) else "/")


def expand_user(path: str) -> Path:
    """With the home folder for a leading `~` or `~user`. Raises StoreError (input) where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise StoreError(
            f"{Path(path).parts[0]!r} is nobody's home folder here",
            where=path,
            hint="write the whole path; a folder of that name here is ./~...",
            kind="input",
        ) from None


def user_name() -> str:
    """For a user who has none, the number."""
    import getpass  # of few verbs

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the latter from Python 3.13 on
        return str(os.getuid())


def config_folder() -> Path:
    """Of what a user says for all pipelines: $XDG_CONFIG_HOME/mlpipe, by default ~/.config/mlpipe. A relative
    one does not count (XDG)."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else home_folder() / ".config") / "mlpipe"


def state_folder() -> Path:
    """What this machine remembers for its user: $XDG_STATE_HOME/mlpipe, by default ~/.local/state/mlpipe. A
    relative one does not count (XDG)."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else home_folder() / ".local/state") / "mlpipe"


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """The first `most_bytes` of a file, or of a pipe, as `<(...)` of a shell is. Raises OSError, also for a
    device, and for a pipe whose writer does not come, or to an end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):  # which open() refuses, and leaves open
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with open(descriptor, "rb", buffering=-1 if stat.S_ISREG(mode) else 0) as file:
        if stat.S_ISREG(mode):
            return file.read(most_bytes)
        if not stat.S_ISFIFO(mode):
            raise OSError(errno.EINVAL, "it is a device, not a file", str(path))
        import select  # of few files

        deadline, pieces = time.monotonic() + PIPE_SECONDS, bytearray()
        while len(pieces) < most_bytes:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([file], [], [], left)[0]:
                words = f"nobody has written all of it into this pipe within {PIPE_SECONDS:.0f} s"
                raise OSError(errno.ETIMEDOUT, words, str(path))
            piece = file.read(most_bytes - len(pieces))
            if piece is None:
                continue
            if not piece:
                break
            pieces += piece
        return bytes(pieces)


def write_whole(path: Path, text: str) -> None:
    """Whole or not at all, its folder made where it is missing. Not for files that must survive a power cut:
    nothing is flushed to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, seconds: float, doing: str, *, unless: Path | None = None) -> Iterator[None]:
    """One process or thread of this node at a time, by a file that is made. Whoever waits, waits no longer
    than until `unless` is there. Raises StoreError when another has been `doing` it for `seconds`."""
    deadline = time.monotonic() + seconds
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_open_as(fd, path):
                    break
                os.close(fd)  # whoever had it removed it, and the next one makes another
                fd = -1
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except BlockingIOError:
                if unless is not None and unless.exists():
                    break
                if time.monotonic() > deadline:
                    words = f"another process has {doing} for {seconds:.0f} s"
                    raise StoreError(words, where=str(path)) from None
                time.sleep(_LOOK_SECONDS)
        try:
            yield
        finally:  # a process forked meanwhile has the file open, too, and with it the lock
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        if fd >= 0:
            os.close(fd)


def is_open_as(fd: int, path: Path) -> bool:
    """Whether that file has this name still."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
