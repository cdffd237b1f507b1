"""What this machine lacks to train, each thing with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mlpipe._core.units import format_bytes
from mlpipe.submit.process_executor import gpu_ids
from mlpipe.submit.submission import Finding

_MEMORY_FLOOR_BYTES = 2 * 2**30


def examine() -> Iterator[Finding]:
    """The Python that runs this, what it can train with, and how fast."""
    yield _python()
    yield _torch()
    yield _cores()
    yield _memory()
    yield _gpus()
    yield _compiler()


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if platform.system() != "Linux":
        return Finding("python", "fail", f"{detail} on {platform.system()}", "mlpipe runs on Linux")
    return Finding("python", "ok", detail)


def _torch() -> Finding:
    """By the package's metadata: importing torch takes seconds."""
    try:
        return Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        return Finding(
            "torch",
            "fail",
            "not installed: pipelines can be planned and submitted from here, not trained",
            "pip install 'mlpipe[train]'",
        )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", "warn", str(cores), "two workers on one core take turns: use nproc 1")
    return Finding("cores", "ok", str(cores))


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    if total < _MEMORY_FLOOR_BYTES:
        return Finding("memory", "warn", format_bytes(total), "a worker needs about 1 GiB: use nproc 1")
    return Finding("memory", "ok", format_bytes(total))


def _gpus() -> Finding:
    gpus = gpu_ids()
    return Finding("gpus", "ok", f"{len(gpus)}" if gpus else "none; training runs on the CPU")


def _compiler() -> Finding:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return Finding("compiler", "ok", path)
    return Finding(
        "compiler",
        "warn",
        "no C++ compiler: `compile` cannot be used on the CPU",
        "apt-get install g++, or leave `compile: off`",
    )
