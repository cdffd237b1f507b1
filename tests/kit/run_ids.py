"""A run's id is one test's, in all processes of a session: files of tests meet in one namespace and one
store, as it happens, and look for the processes of a run on the whole machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

# Of a session, where it has one: a link a run, to the test that has it.
folder: Path | None = None


def claim(run_id: str) -> None:
    """For the test that is running. Raises AssertionError where another one has it."""
    if folder is None:
        return
    test, path = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0], folder / run_id
    with contextlib.suppress(FileExistsError):
        path.symlink_to(test)
    assert (other := os.readlink(path)) == test, f"{other} has a run {run_id!r}, too: give one another name"


def claim_named(argv: Iterable[object]) -> None:
    """The run or sweep that a command line gives a name to, if it does."""
    for option, value in pairwise(map(str, argv)):
        if option in ("--run-id", "--sweep-id"):
            claim(value)
