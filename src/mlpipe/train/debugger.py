"""The rank that has the terminal (`mlpipe run --debug-rank`): its input and output are the terminal's, so
that `breakpoint()` stops it there and pdb answers. It stays in its own session: Ctrl-C goes to `mlpipe
run`, as always. Standard library only.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlpipe._core import environment


def terminal_of(rank: int) -> str | None:
    """The path of the terminal that `rank` has; None: it has none."""
    debugged, _, path = os.environ.get(environment.DEBUG_RANK, "").partition(":")
    return path if debugged == str(rank) else None


def take(path: str) -> None:
    """Standard input, output and error of this process become the terminal's."""
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for out in (sys.stdout, sys.stderr):
        out.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def was_left(error: BaseException | None) -> bool:
    """Whether somebody quit the debugger, whatever was made of that on the way. By name: bdb is not imported
    for it."""
    return error is not None and (type(error).__name__ == "BdbQuit" or was_left(error.__cause__))


@contextmanager
def no_breakpoints() -> Iterator[None]:
    """For a pass that computes nothing: there is nothing to look at."""
    hook, sys.breakpointhook = sys.breakpointhook, lambda *args, **kwargs: None
    try:
        yield
    finally:
        sys.breakpointhook = hook
