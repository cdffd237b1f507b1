"""Parts of this machine for trials that run side by side: what is started in one inherits it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from mlpipe._core import environment
from mlpipe.plan.hardware import machine_memory_bytes
from mlpipe.submit.backend import Backend
from mlpipe.submit.process_executor import gpu_ids

T = TypeVar("T")
_GPUS = "CUDA_VISIBLE_DEVICES"


@contextmanager
def part_of_machine(backend: Backend, slot: int, num_slots: int) -> Iterator[None]:
    """Within, processes that this thread starts have the CPUs and GPUs of `slot`, 0 to `num_slots` - 1, and
    plan with a part of the memory. Nothing where runs have machines of their own."""
    if backend.has_own_driver or num_slots == 1:
        yield
        return
    cpus, gpus = sorted(os.sched_getaffinity(0)), gpu_ids()
    before = {name: os.environ.get(name) for name in (_GPUS, environment.MEMORY)}
    os.environ[environment.MEMORY] = str(machine_memory_bytes() // num_slots)
    os.sched_setaffinity(0, part(cpus, slot, num_slots) or [cpus[slot % len(cpus)]])
    if gpus:
        os.environ[_GPUS] = ",".join(part(gpus, slot, num_slots))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def part(items: Sequence[T], slot: int, num_slots: int) -> Sequence[T]:
    """Neighbours, as many as any other slot has or one more; none where there are fewer items than slots."""
    if len(items) < num_slots:
        return items[slot : slot + 1]
    return items[len(items) * slot // num_slots : len(items) * (slot + 1) // num_slots]
