"""This machine's CPUs: how many there are for this process, and of which kind."""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def num_cpus() -> int:
    """That it may use: of those that it may run on as many as its cgroup has time for, and at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = _QUOTA.read_text().split()
    except OSError:  # not every kernel has this kind of cgroup
        return cores
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def processor() -> str:
    """By its maker's name."""
    if name := cpuinfo("model name"):
        return name
    import platform

    return platform.processor() or "CPU"


def cpuinfo(key: str) -> str:
    """What Linux says of the first one; empty where it does not."""
    try:
        with _CPUINFO.open() as lines:
            line = next((line for line in lines if line.startswith(key)), "")
    except OSError:
        return ""
    return line.partition(":")[2].strip()
