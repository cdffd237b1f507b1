"""What a stage runs on. Everything that `plan` knows of machines is in `Hardware`, so that a plan depends
on its arguments alone; `detect_hardware` is the only code here that looks at the machine, and at what is
known of it (`machine.py`)."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from mlpipe._core import environment
from mlpipe._core.cpus import cpuinfo, num_cpus
from mlpipe._core.errors import PlanError
from mlpipe._core.gpus import gpu_classes, slices_of
from mlpipe._core.units import parse_bytes
from mlpipe.plan.speed import Speed

if TYPE_CHECKING:
    from mlpipe.spec.model import Resources

GIB = 2**30
CATALOGUE = Path(__file__).with_name("catalogue.json")


class Gpu(NamedTuple):
    """A line of the catalogue. Dense peaks, without the datasheets' 2:4 sparsity, in FLOP/s; fp32: outside
    the tensor cores. `bf16` is None for cards before Ampere, the price where no source was found. `fp16`, of
    sums in fp32: None where it is as fast as bf16, or is not there either. `float8_speedup`: of its best
    matmul over bf16's; None: it has none, or nobody knows."""

    memory_bytes: int
    bf16: float | None
    fp32: float
    achievable_ratio: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    price_usd_per_hour: float | None
    host_bytes_per_second: float = 0.0
    float8_speedup: float | None = None
    fp16: float | None = None
    multiprocessors: float = 0.0

    @property
    def speed(self) -> Speed:
        known = {"fp32": self.fp32, "bf16": self.bf16, "fp16": self.fp16 or self.bf16}
        peaks = {name: peak for name, peak in known.items() if peak}
        return Speed(
            peaks,
            self.achievable_ratio,
            self.memory_bytes_per_second,
            self.link_bytes_per_second,
            self.network_bytes_per_second,
            float8_speedup=self.float8_speedup,
            host_bytes_per_second=self.host_bytes_per_second,
            multiprocessors=self.multiprocessors,
        )


def _read_catalogue() -> tuple[dict[str, Gpu], Speed]:
    """The GPUs by name, and one core of a CPU. Sources of the figures: in the file itself."""
    catalogue = json.loads(CATALOGUE.read_bytes())

    def figures(entry: dict[str, list[Any]]) -> dict[str, Any]:
        values = {name.removesuffix("_flops"): value for name, (value, _) in entry.items()}
        whole = {"memory_bytes"}
        return {k: v if v is None or k in whole else float(v) for k, v in values.items()}

    core = Gpu(memory_bytes=0, **figures(catalogue["cpu_core"])).speed
    return {name: Gpu(**figures(entry)) for name, entry in catalogue["gpus"].items()}, core


GPUS, CPU_CORE = _read_catalogue()


# Of a class that only commands may use, whose steps nobody predicts.
_OF_COMMANDS = Gpu(0, None, 0.0, 0.0, 0.0, 0.0, 0.0, None)


class Hardware(NamedTuple):
    """`memory_bytes`: of one device; on CPU a worker's share of its node. `peak_flops`: dense, per device,
    by precision; a precision that is missing has no known peak (on CPU the worker measures it).
    `price_usd_per_device_hour`: None where nobody said. `native_bf16`: the instructions by which the CPU
    multiplies bf16; None: it has none, or nobody knows the machine."""

    device: Literal["cpu", "cuda"]
    num_nodes: int
    devices_per_node: int
    memory_bytes: int
    name: str
    peak_flops: Mapping[str, float]
    cpus_per_node: int
    speed: Speed = CPU_CORE
    price_usd_per_device_hour: float | None = None
    native_bf16: str | None = None
    # Of a gang of several classes each, with its own nodes; all above is then of the gang (`together`).
    groups: tuple["Hardware", ...] = ()
    relative_speed: float | None = None  # of a group whose speed beside the others' the file says
    comes_and_goes: bool = False  # an elastic training's node, among others of its like

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        if self.groups:
            return " + ".join(map(str, self.groups))
        nodes = f"{self.num_nodes} nodes x " if self.num_nodes > 1 else ""
        return f"{nodes}{self.devices_per_node} x {self.name}"


def detect_hardware(resources: "Resources | None", *, elsewhere: bool = False) -> Hardware:
    """The hardware that `resources` ask for: GPUs by their name in the catalogue, changed or described by
    `resources.device`; CPUs by this machine's cores and memory (or its cgroup's) where the resources do not
    say. `elsewhere`: it will run on another machine, so this one's processor says nothing. Raises PlanError
    for an unknown GPU that is not described."""
    nodes = resources.gang_nodes if resources else 1
    cpus = max(1, int(resources.cpus)) if resources and resources.cpus else num_cpus()
    asked = resources.price_usd_per_gpu_hour if resources else None
    measured = None
    if resources and resources.hardware:
        from mlpipe.plan.calibration import load

        measured = load(resources.hardware)
        wanted = "cuda" if resources.gpus_per_node else "cpu"
        if measured.device != wanted:
            raise PlanError(
                f"measured on {measured.device}, and the stage runs on {wanted}",
                where=resources.hardware,
                hint="run mlpipe calibrate where the training will run",
            )
    if resources and resources.gpus_per_node:
        gpu = _sliced(_gpu(resources), resources)
        price = gpu.price_usd_per_hour if asked is None else asked
        speed = gpu.speed
        if measured is not None:
            speed = measured.speed(resources.gpus_per_node, speed)
        return Hardware(
            "cuda",
            nodes,
            resources.gpus_per_node,
            gpu.memory_bytes,
            " ".join(filter(None, (resources.gpu or "GPU", resources.slice))),
            gpu.speed.peak_flops,
            cpus,
            speed,
            price,
        )
    workers = (resources.workers_per_node if resources else None) or 1
    memory = parse_bytes(resources.memory) if resources and resources.memory else machine_memory_bytes()
    speed = cpu_speed(cpus / workers)
    if measured is not None:
        speed = measured.speed(workers, speed)
    elif not elsewhere and knows_machine():
        from mlpipe.plan import machine

        speed = machine.speed_here(speed, workers, cpus / workers)
    bf16 = None if elsewhere else _native_bf16()
    return Hardware("cpu", nodes, workers, memory // workers, "CPU worker", {}, cpus, speed, asked, bf16)


def together(groups: Sequence[Hardware]) -> Hardware:
    """The gang of them: its figures are those that each has at least, its price and peaks the mean."""
    num_nodes = sum(one.num_nodes for one in groups)
    slowest = min(groups, key=lambda one: max(one.speed.peak_flops.values()))
    known = {
        name: peak
        for name, peak in slowest.speed.peak_flops.items()
        if all(name in one.speed.peak_flops for one in groups)
    }
    peaks = {
        name: sum(one.peak_flops[name] * one.num_nodes for one in groups) / num_nodes
        for name in known
        if slowest.peak_flops
    }
    prices = [one.price_usd_per_device_hour for one in groups]
    network = min(one.speed.network_bytes_per_second for one in groups)
    return slowest._replace(
        num_nodes=num_nodes,
        memory_bytes=min(one.memory_bytes for one in groups),
        name=" + ".join(dict.fromkeys(one.name for one in groups)),
        peak_flops=peaks,
        cpus_per_node=min(one.cpus_per_node for one in groups),
        speed=slowest.speed._replace(peak_flops=known, network_bytes_per_second=network),
        price_usd_per_device_hour=None
        if None in prices
        else sum((one.price_usd_per_device_hour or 0.0) * one.num_nodes for one in groups) / num_nodes,
        groups=tuple(groups),
        relative_speed=None,
    )


def _sliced(gpu: Gpu, resources: "Resources") -> Gpu:
    """The part of it that a slice is, by the class of the GPU; its price by the multiprocessors. Raises
    PlanError."""
    name = resources.slice
    if name is None:
        return gpu
    known = gpu_classes().get(resources.gpu or "")
    if known is None or name not in known.slices:
        raise PlanError(
            f"{resources.gpu} has no slice {name!r}", where="resources.slice", hint=slices_of(resources.gpu)
        )
    part = known.slices[name]
    compute, price = part.sevenths / 7, gpu.price_usd_per_hour
    return gpu._replace(
        memory_bytes=known.slice_bytes(name),
        bf16=gpu.bf16 and gpu.bf16 * compute,
        fp32=gpu.fp32 * compute,
        memory_bytes_per_second=gpu.memory_bytes_per_second * part.eighths / 8,
        price_usd_per_hour=price and price * compute,
        multiprocessors=gpu.multiprocessors * compute,
    )


def cpu_speed(num_cores: float) -> Speed:
    """Of a worker with a share of its node's cores, as the catalogue assumes it."""
    return CPU_CORE._replace(
        peak_flops={name: peak * num_cores for name, peak in CPU_CORE.peak_flops.items()},
        memory_bytes_per_second=CPU_CORE.memory_bytes_per_second * num_cores,
    )


def _gpu(resources: "Resources") -> Gpu:
    name, own = resources.gpu or "", resources.device
    known = GPUS.get(name)
    if own is None:
        if known is None and (there := gpu_classes().get(name)) is not None and not there.vendor.trains:
            return _OF_COMMANDS
        if known is None:
            raise PlanError(
                f"unknown GPU {name!r}",
                hint=f"write resources.gpu as one of {', '.join(GPUS)}, or describe it in resources.device",
            )
        return known
    described: dict[str, float | None] = {
        "memory_bytes": parse_bytes(own.memory) if own.memory else None,
        "fp32": own.fp32_tflops and own.fp32_tflops * 1e12,
        "bf16": own.bf16_tflops and own.bf16_tflops * 1e12,
        "fp16": own.fp16_tflops and own.fp16_tflops * 1e12,
        "achievable_ratio": own.achievable_ratio,
        "memory_bytes_per_second": own.memory_gb_per_second and own.memory_gb_per_second * 1e9,
        "link_bytes_per_second": own.link_gb_per_second and own.link_gb_per_second * 1e9,
        "network_bytes_per_second": own.network_gb_per_second and own.network_gb_per_second * 1e9,
    }
    given = {field: value for field, value in described.items() if value is not None}
    if known is not None:
        return known._replace(**cast(dict[str, Any], given))
    needed = {"memory_bytes": "memory", "fp32": "fp32_tflops"}
    missing = [key for field, key in needed.items() if field not in given]
    if missing:
        raise PlanError(
            f"GPU {name!r} is not in the catalogue, and its description lacks {' and '.join(missing)}",
            where="resources.device",
            hint=f"add {', '.join(missing)}, or write resources.gpu as one of {', '.join(GPUS)}",
        )
    # What a description leaves open is that of the slowest kind: a card on PCIe, nodes on shared Ethernet.
    slowest = GPUS["T4"]._replace(bf16=None, fp16=None, price_usd_per_hour=None)
    return slowest._replace(**cast(dict[str, Any], given))


def _native_bf16() -> str | None:
    """Of Linux on x86, whose kernel lists what the processor can do; elsewhere nobody is asked."""
    flags = cpuinfo("flags").split()
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), None)


def knows_machine() -> bool:
    """Unless the user has switched off what is known of this machine unasked (`machine.py`)."""
    return environment.is_on(os.environ.get(environment.CALIBRATE, "")) is not False


def machine_memory_bytes() -> int:
    """Of this machine, or its cgroup's limit, or the part of it that a trial of a sweep has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _first_line(path)
        if limit.isdigit():
            total = min(total, int(limit))
    part = os.environ.get(environment.MEMORY, "")
    return min(total, int(part)) if part.isdigit() else total


def _first_line(path: str) -> str:
    """Empty where there is no such file: not every kernel has both kinds of cgroup."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
