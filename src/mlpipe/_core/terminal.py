"""The modes of a terminal (echo, whole lines), which a program that is killed at a prompt leaves as readline
made them."""

from __future__ import annotations

import os
import termios
from contextlib import suppress
from pathlib import Path


class TerminalModes:
    """Those of the terminal `path` as they are now, while the process group `group` is at it."""

    def __init__(self, path: str, group: int) -> None:
        self._path, self._group = path, group
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
        self._modes = termios.tcgetattr(terminal)
        os.close(terminal)

    def restore(self) -> None:
        """Unless another group is at it by now: a shell at its prompt has modes of its own. Nothing where the
        terminal is gone."""
        with suppress(OSError, termios.error):
            terminal = os.open(self._path, os.O_RDWR | os.O_NOCTTY)
            if _group_at(os.fstat(terminal).st_rdev) in (None, self._group):
                termios.tcsetattr(terminal, termios.TCSANOW, self._modes)
            os.close(terminal)


def _group_at(terminal: int) -> int | None:
    """The process group in the foreground of the terminal (proc(5): tty_nr and tpgid); None: it controls no
    process."""
    for process in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = process.read_bytes().rpartition(b")")[2].split()  # bytes: a name may be any
            tty, group = map(int, fields[4:6])
            if tty == terminal:
                return group
    return None
