"""Whose modes a terminal has after a program was killed at a prompt."""

from __future__ import annotations

import os
import subprocess
import sys
import termios

import pytest

from mlpipe._core.terminal import TerminalModes

pytestmark = pytest.mark.unit

_AT_IT = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); print(flush=True); input()"


def _silent(terminal: int) -> list[object]:
    modes = termios.tcgetattr(terminal)
    modes[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    return termios.tcgetattr(terminal)


@pytest.mark.parametrize("at_it", ["nobody", "the program", "a shell"])
def test_modes_are_given_back_unless_a_shell_has_its_own_by_now(at_it: str):
    master, slave = os.openpty()
    shell = subprocess.Popen(
        [sys.executable, "-IS", "-c", _AT_IT if at_it != "nobody" else "print(flush=True); input()"],
        stdin=slave,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert shell.stdout is not None
        shell.stdout.readline()
        before = termios.tcgetattr(slave)
        modes = TerminalModes(os.ttyname(slave), os.getpgrp() if at_it == "a shell" else shell.pid)
        changed = _silent(slave)
        assert changed != before
        modes.restore()
        assert termios.tcgetattr(slave) == (changed if at_it == "a shell" else before)
    finally:
        shell.kill()
        shell.communicate()
        os.close(slave)
        os.close(master)
    modes.restore()  # which finds no terminal
