"""Which process a pid means. A pid is given again, and each PID namespace has its own: a process is named by
boot, PID namespace, pid and start time, and only who shares the namespace can tell whether it lives."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_START_TIME = 19  # of the fields after the name in /proc/PID/stat (proc_pid_stat(5): field 22)


@dataclass(frozen=True)
class ProcessId:
    """`namespace`: boot id and PID namespace; "" where /proc does not tell. `started`: clock ticks since the
    boot."""

    pid: int
    namespace: str = ""
    started: int = 0


def this_process() -> ProcessId:
    """Who we are; without `namespace` where /proc does not tell."""
    pid = os.getpid()
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
        # a /proc of another PID namespace (unshare without --mount-proc) has other pids
        started = start_time(pid) if os.readlink(_PROC / "self") == str(pid) else None
    except OSError:
        started = None
    return ProcessId(pid) if started is None else ProcessId(pid, f"{boot} {namespace}", started)


def is_alive(process: ProcessId) -> bool | None:
    """None where it cannot be told from here."""
    here = this_process().namespace
    if not here or process.namespace != here:
        return None
    return start_time(process.pid) == process.started


def start_time(pid: int) -> int | None:
    """In ticks after the boot; None of one that is gone, or dead and not waited for."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(") ")[2].split()  # the name before may hold anything
    return None if state in "ZX" else int(fields[_START_TIME - 1])
