"""What a stage runs on. Everything that `plan` knows of machines is in `Hardware`, so that a plan depends
on its arguments alone; `detect_hardware` is the only code here that looks at the machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mlpipe._core.errors import PlanError
from mlpipe._core.units import parse_bytes

if TYPE_CHECKING:
    from mlpipe.spec.model import Resources

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """Dense peaks, without the datasheets' 2:4 sparsity, in FLOP/s. fp32: outside the tensor cores."""

    memory_bytes: int
    bf16: float | None
    fp32: float


# Each line: NVIDIA's datasheet of that board. Where it prints "with sparsity", half of it stands here.
# V100 and T4 have no bf16. Memory: what the driver shows as total is up to 2 % less; see `usable_bytes`.
GPUS: dict[str, Gpu] = {
    "B200": Gpu(180 * GIB, 2_250e12, 75e12),  # DGX B200 datasheet: 1,440 GB; 36 PFLOPS bf16 sparse, by 8
    "H200": Gpu(141 * 10**9, 989e12, 67e12),  # H200 datasheet, SXM: 1,979 TFLOPS bf16 sparse
    "H100-80GB": Gpu(80 * GIB, 989e12, 67e12),  # H100 datasheet, SXM: 1,979 TFLOPS bf16 sparse
    "A100-80GB": Gpu(80 * GIB, 312e12, 19.5e12),  # A100 datasheet: 312 TFLOPS bf16
    "A100-40GB": Gpu(40 * GIB, 312e12, 19.5e12),  # A100 datasheet
    "L40S": Gpu(45 * GIB, 362e12, 91.6e12),  # L40S datasheet: 362.05 TFLOPS bf16; 48 GB with ECC on
    "L4": Gpu(22 * GIB, 121e12, 30.3e12),  # L4 datasheet: 242 TFLOPS bf16 sparse; 24 GB with ECC on
    "RTX-4090": Gpu(24 * GIB, 165.2e12, 82.6e12),  # Ada whitepaper v1.1, appendix A: bf16, fp32 accumulate
    "V100": Gpu(32 * GIB, None, 15.7e12),  # V100 datasheet, SXM2 32 GB
    "T4": Gpu(15 * GIB, None, 8.1e12),  # T4 datasheet: 16 GB with ECC on
}


@dataclass(frozen=True)
class Hardware:
    """`memory_bytes`: of one device; on CPU a worker's share of its node. `peak_flops`: dense, per device,
    by precision; a precision that is missing has no known peak (on CPU the worker measures it)."""

    device: Literal["cpu", "cuda"]
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    name: str
    peak_flops: dict[str, float]
    cpus_per_node: int

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def usable_bytes(self) -> int:
        """What tensors may have: less CUDA context and kernels (0.5-2 GiB) and NCCL (1-2 GiB), on CPU less
        the interpreter with torch (about 0.4 GiB); and 10 % for the allocator and the estimate's error."""
        own = 3 * GIB if self.device == "cuda" else 0.5 * GIB
        return max(0, int((self.memory_bytes - own) * 0.9))

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} nodes x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.devices_per_node} x {self.name}"


def detect_hardware(resources: Resources | None) -> Hardware:
    """The hardware that `resources` ask for: GPUs by their name in GPUS, CPUs by this machine's cores and
    memory (or its cgroup's) where the resources do not say. Raises PlanError for an unknown GPU."""
    nodes = resources.nodes if resources else 1
    cpus = max(1, int(resources.cpus)) if resources and resources.cpus else _num_cpus()
    if resources and resources.gpus_per_node:
        name = resources.gpu or ""
        gpu = GPUS.get(name)
        if gpu is None:
            raise PlanError(f"unknown GPU {name!r}", hint=f"write resources.gpu as one of {', '.join(GPUS)}")
        peaks = {"fp32": gpu.fp32} | ({"bf16": gpu.bf16} if gpu.bf16 else {})
        return Hardware("cuda", nodes, resources.gpus_per_node, gpu.memory_bytes, name, peaks, cpus)
    workers = (resources.workers_per_node if resources else None) or 1
    memory = parse_bytes(resources.memory) if resources and resources.memory else _memory_bytes()
    return Hardware("cpu", nodes, workers, memory // workers, "CPU worker", {}, cpus)


def _num_cpus() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_line("/sys/fs/cgroup/cpu.max").split()
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def _memory_bytes() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _first_line(path)
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def _first_line(path: str) -> str:
    """Empty where there is no such file: not every kernel has both kinds of cgroup."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
