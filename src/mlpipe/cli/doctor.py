"""`mlpipe doctor`: what this machine and the store lack, each with its remedy."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, TypeVar

import click

from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe._core.units import format_bytes
from mlpipe.cli.session import Session, shared

T = TypeVar("T")
_MEMORY_FLOOR_BYTES = 2 * 2**30
_DISK_FLOOR_BYTES = 5 * 2**30
_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@dataclass(frozen=True)
class Finding:
    """`fail` keeps mlpipe from training here; `warn` takes something away."""

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str | None = None


@click.command()
@shared
@click.pass_obj
def command(session: Session) -> int:
    """Say what this machine and the store lack, each with its remedy.

    Exits 0 when a pipeline can be trained here, else 4.
    """
    findings = list(examine(session))
    lines = []
    for finding in findings:
        word, colour = _MARKS[finding.level]
        lines.append(f"{click.style(word.ljust(4), fg=colour)}  {finding.name.ljust(9)}  {finding.detail}")
        if finding.remedy:
            lines.append(f"{'':17}-> {finding.remedy}")
    failed = any(finding.level == "fail" for finding in findings)
    session.result({"usable": not failed, "findings": [asdict(f) for f in findings]}, "\n".join(lines))
    return EXIT_CODES["infrastructure"] if failed else 0


def examine(session: Session) -> Iterator[Finding]:
    yield _python()
    yield _torch()
    yield _cores()
    yield _memory()
    yield _gpus()
    yield _compiler()
    yield from _store(session)


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
    from mlpipe.submit.local import gpu_ids

    gpus = gpu_ids()
    return Finding("gpus", "ok", f"{len(gpus)}" if gpus else "none; training runs on the CPU")


def _compiler() -> Finding:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return Finding("compiler", "ok", found)
    return Finding(
        "compiler",
        "warn",
        "no C++ compiler: `compile: block` cannot be used on the CPU",
        "apt-get install g++, or leave `compile: off`",
    )


def _store(session: Session) -> Iterator[Finding]:
    url = session.store_url or "./runs"
    store = _attempt("store", lambda: session.open_store())
    if isinstance(store, Finding):
        yield store
        return
    problem = _attempt("store", store.probe)
    if isinstance(problem, Finding):
        yield problem
        return
    yield Finding("store", "ok", f"{url}: writes, reads and conditional writes work")
    folder = store.local_path("runs")
    if folder is not None:
        folder = folder.parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        level: Literal["ok", "warn"] = "ok" if free > _DISK_FLOOR_BYTES else "warn"
        remedy = None if level == "ok" else "free some, or give --store on another disk"
        yield Finding("disk", level, f"{format_bytes(free)} free in {folder}", remedy)


def _attempt(name: str, action: Callable[[], T]) -> T | Finding:
    try:
        return action()
    except MlpipeError as error:
        return Finding(name, "fail", str(error), error.hint)
