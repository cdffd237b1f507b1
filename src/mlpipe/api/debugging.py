"""Gives one rank of a run the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlpipe._core import environment
from mlpipe._core.errors import SubmitError
from mlpipe._core.terminal import TerminalModes
from mlpipe.api.pipeline import LoadedPipeline
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.training import trainings

_PATIENCE = "7 d"  # of the watchdog and of collectives, while somebody looks around


def debugged(pipeline: LoadedPipeline, rank: int) -> LoadedPipeline:
    """The pipeline as it is run for debugging: nothing hangs too early, and nothing is started again. From
    here on whatever this process starts gives `rank` of each training, and of what evaluates it, the terminal
    of standard input. Raises SubmitError (input) where that is none, or no training has the rank."""
    if not sys.stdin.isatty():
        raise SubmitError(
            "standard input is no terminal, and a debugger needs one",
            where="--debug-rank",
            hint="run it in a terminal, without a pipe in front",
            kind="input",
        )
    if pipeline.spec.sweep is not None:
        hint = "run one of its trials, without: --set sweep=null"
        raise SubmitError("the pipeline has a sweep", where="--debug-rank", hint=hint, kind="input")
    sizes = {name: stage_hardware(pipeline.spec, name).world_size for name in trainings(pipeline.spec)}
    if rank >= max(sizes.values(), default=0):
        there = ", ".join(f"{name} has {size}" for name, size in sizes.items()) or "nothing trains"
        raise SubmitError(f"there is no rank {rank}: {there}", where="--debug-rank", kind="input")
    changes = [
        change
        for name in sizes
        for change in (f"stages.{name}.train.hang_timeout={_PATIENCE}", f"stages.{name}.train.max_restarts=0")
    ]
    os.environ[environment.DEBUG_RANK] = f"{rank}:{os.ttyname(sys.stdin.fileno())}:{os.getpid()}"
    return pipeline.override(changes)


@contextmanager
def terminal_given_back() -> Iterator[None]:
    """After it the terminal of standard input has the modes that it had before: a rank that was killed at its
    prompt left others."""
    modes = TerminalModes(os.ttyname(sys.stdin.fileno()), os.getpgrp())
    try:
        yield
    finally:
        modes.restore()
