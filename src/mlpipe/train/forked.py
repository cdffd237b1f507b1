"""In a fork of `standby.py`: a program that finds its modules there already, and whether another may."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from mlpipe._core import environment
from mlpipe.train.as_program import run_as_program
from mlpipe.train.stop import die_with_parent

_environment: dict[str, str] | None = None  # in which torch was imported
_files: set[str] = set()  # file descriptors of that time


def remember(env: Mapping[str, str]) -> None:
    """By the process whose forks begin: what it was started in, and which files it has open."""
    global _environment
    _environment = dict(env)
    _files.update(os.listdir("/proc/self/fd"))


def fits(env: Mapping[str, str]) -> bool:
    """Whether this process may fork a torchrun that is to have this environment, instead of starting one."""
    if _environment is None or len(os.listdir("/proc/self/task")) > 1:
        return False
    return environment.same_at_start(_environment, env)


def begin_torchrun(parent: int, argv: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """In a fork of the launcher `parent`: what `argv` would do as a command."""
    die_with_parent(parent)
    for file in set(os.listdir("/proc/self/fd")) - _files:
        with contextlib.suppress(OSError):  # the listing's own
            os.close(int(file))  # subprocess waits for the end of one of them
    gc.enable()  # which subprocess has switched off
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    take(argv, env)
    from mlpipe.train import torchrun

    run_as_program(lambda: torchrun.main(sys.argv[1:]))


def take(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """`argv`, of `python -m MODULE`, and the environment, also where others look: /proc/PID."""
    os.environ.clear()  # C's strings of the first environment lie where the new one is shown
    os.environ.update(env)
    module, *arguments = argv[argv.index("-m") + 1 :]
    sys.argv = [str(sys.modules[module].__file__), *arguments]
    at_once = bool(env.get("PYTHONUNBUFFERED"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=at_once)  # type: ignore[union-attr]
    # proc(5): arg_start, arg_end, env_start and env_end in /proc/self/stat. Ours first: the rest may not fit.
    places = list(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))
    ours_first = sorted(env.items(), key=lambda item: not environment.is_ours(item[0]))
    variables = [f"{name}={value}" for name, value in ours_first]
    for (start, end), words in zip((places[:2], places[2:]), (argv, variables), strict=True):
        text = os.fsencode("\0".join(words))[: end - start - 1]
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
