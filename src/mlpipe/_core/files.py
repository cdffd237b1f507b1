"""Names that records can hold, and files that others read while they are written."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from mlpipe._core.errors import MlpipeError


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
