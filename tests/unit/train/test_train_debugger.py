"""What is made of a debugger that somebody quits."""

from __future__ import annotations

import os
import subprocess
import sys
from bdb import BdbQuit
from contextlib import suppress

import pytest

from mlpipe._core.errors import TrainError
from mlpipe.train import debugger, outcome, stop
from mlpipe.train.debugger import no_breakpoints

pytestmark = pytest.mark.unit


def test_a_quit_is_told_as_one_whatever_was_made_of_it():
    try:
        try:
            raise BdbQuit
        except Exception as error:
            raise TrainError("its data set is not map-style: BdbQuit: ", kind="input") from error
    except TrainError as error:
        told = outcome.failed(error, rank=1, step=0)
    assert (told.message, told.kind) == ("left in the debugger", "failed")
    told = outcome.failed(TrainError("its data set is odd", kind="input"), rank=1, step=0)
    assert (told.message, told.kind) == ("its data set is odd", "input")


def test_without_breakpoints_none_stops_until_it_is_over(monkeypatch):
    stopped: list[int] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: stopped.append(1))
    with pytest.raises(ZeroDivisionError), no_breakpoints():
        breakpoint() or 1 / 0
    assert stopped == []
    breakpoint()
    assert stopped == [1]


def test_a_rank_that_cannot_give_the_terminal_back_leaves_all_the_same(monkeypatch):
    def fails():
        raise ValueError("no terminal of this kind is known")

    codes: list[int] = []
    monkeypatch.setattr(debugger, "give_back", fails)
    monkeypatch.setattr(os, "_exit", codes.append)
    lender = subprocess.Popen(["true"])
    ended = os.pidfd_open(lender.pid)
    lender.wait(60)
    for leave in (stop._leave_at_once, lambda: debugger._leave_with(ended)):
        with suppress(ValueError):  # from behind an _exit that returns
            leave()
    os.close(ended)
    assert codes == [143, 129]
