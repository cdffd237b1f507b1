"""The rank that has the terminal (`mlpipe run --debug-rank`): its input and output are the terminal's, so
that `breakpoint()` stops it there and pdb answers. It stays in its own session: Ctrl-C goes to `mlpipe
run`, as always. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mlpipe._core import environment
from mlpipe._core.terminal import TerminalModes

_LEFT = 128 + signal.SIGHUP  # as a program whose terminal is gone
_taken: list[TerminalModes] = []  # the terminal's, of the rank that has it


def terminal_of(rank: int) -> tuple[str, int] | None:
    """The path of the terminal that `rank` has, and the pid of the `mlpipe run` that lends it; None: it has
    none."""
    debugged, _, lent = os.environ.get(environment.DEBUG_RANK, "").partition(":")
    path, _, owner = lent.rpartition(":")
    return (path, int(owner)) if debugged == str(rank) else None


def take(path: str, owner: int) -> None:
    """Standard input, output and error of this process become the terminal's, until the process `owner` ends,
    and this one with it."""
    try:
        lender = os.pidfd_open(owner)
        _taken.append(TerminalModes(path, os.getpgid(owner)))
    except ProcessLookupError:
        os._exit(_LEFT)
    threading.Thread(target=_leave_with, args=(lender,), name="debugger", daemon=True).start()
    terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
    for stream in (0, 1, 2):
        os.dup2(terminal, stream)
    os.close(terminal)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    for out in (sys.stdout, sys.stderr):
        out.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def give_back() -> None:
    """The terminal, with the modes that it had, before this process ends at once; nothing if it has none."""
    for modes in _taken:
        modes.restore()


def _leave_with(lender: int) -> None:
    """At once: a rank at the prompt would save nothing, and read what is typed to the shell for as long as it
    is given to save."""
    poll = select.poll()
    poll.register(lender, select.POLLIN)
    poll.poll()
    try:
        give_back()
    finally:
        os._exit(_LEFT)


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
