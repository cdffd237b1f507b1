"""The user's own frames of a traceback, which is mostly torch's and ours. Standard library only."""

from __future__ import annotations

import linecache
import os
import sysconfig
import traceback
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import mlpipe

_LIBRARIES = tuple(
    f"{Path(path).resolve()}/"
    for path in (
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(mlpipe.__file__),
    )
)
_MOST = 8  # frames that are shown, the innermost


@dataclass(frozen=True)
class Frame:
    """A call in the user's code. `num_folded`: calls in libraries between it and the one before."""

    place: str  # file:line
    function: str
    line: str
    num_folded: int


def own_frames(error: BaseException, packages: Collection[str]) -> list[Frame]:
    """Outermost first, of the first cause that has any. `packages`: whose modules are the user's, also where
    they are installed; so is whatever lies in no library's folder."""
    frames: list[Frame] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        frames = _of(cause, packages) or frames
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return frames


def _of(error: BaseException, packages: Collection[str]) -> list[Frame]:
    frames, num_folded = [], 0
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = frame.f_code.co_filename
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in packages and (path.startswith("<") or _resolved(path).startswith(_LIBRARIES)):
            num_folded += 1
            continue
        text = linecache.getline(path, line).strip()
        frames.append(Frame(f"{path}:{line}", frame.f_code.co_name, text, num_folded))
        num_folded = 0
    return frames


def _resolved(path: str) -> str:
    try:
        return str(Path(path).resolve())
    except OSError:
        return path


def told(frames: list[Frame]) -> str:
    """Lines to put below a message; "" of none."""
    lines = [f"... {len(frames) - _MOST} more of yours"] if len(frames) > _MOST else []
    for frame in frames[-_MOST:]:
        if frame.num_folded and frame is not frames[0]:
            lines.append(f"... {frame.num_folded} of libraries")
        lines.append(f"{frame.place} in {frame.function}: {frame.line}")
    return "".join(f"\n  | {line}" for line in lines)
