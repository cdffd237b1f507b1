"""What one machine can do: its GPUs, its speed, its disk, and the store as it sees it.

A speed is the best of three looks, each long enough to feel a limit of CPU time, which Linux enforces in
periods of 100 ms: others on the machine make a look slow now and then, a fault makes all of them slow. On
CPUs each core works by itself: threads that wait for each other would measure who else is there.
"""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from mlpipe._core.cpu_load import Clock
from mlpipe._core.cpus import num_cpus
from mlpipe._core.errors import StoreError
from mlpipe._core.units import format_bytes
from mlpipe.observe.gpu import find_gpu
from mlpipe.plan.plan import Plan, PreflightPlan
from mlpipe.store.base import Store
from mlpipe.store.preflight import probe_key
from mlpipe.train.precision import DTYPES
from mlpipe.train.preflight.remembered import AGE, SPEEDS, recall
from mlpipe.train.preflight.start import at
from mlpipe.train.preflight.verdict import PEERS, Report

_LOOKS, _LOOK_SECONDS = 3, 0.35
_MOST_THREADS = 8
_STORE_BYTES = 4 * 2**20
_DISK_BYTES = 2**20
_SMI_SECONDS = 20.0
_RDMA = Path("/sys/class/infiniband")
_ECC, _SLOW = "ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"
_OLDER = {
    _SLOW: "clocks_throttle_reasons.hw_slowdown"
}  # names before driver 535, which newer ones may refuse
# Of programs, as NVIDIA's device plugin for Kubernetes has it: these GPUs are healthy.
_XIDS_OF_PROGRAMS = {13, 31, 43, 45, 68, 109}


def look(plan: Plan, limits: PreflightPlan, scratch: Path, store: Store, report: Report) -> None:
    """All of these into `report`; what it is at stands in a file of `scratch`."""
    report.on_gpus = plan.launch.device == "cuda"
    at(scratch, "the disk")
    report.faults += disk(scratch, limits, report)
    at(scratch, "the GPUs" if report.on_gpus else "a matmul")
    if report.on_gpus:
        report.faults += gpus(plan.launch.nproc_per_node, report.unread)
    if limits.rdma:
        report.faults += rdma()
    remembered = recall(plan, report.node)
    if remembered is not None and all(remembered[name] >= least for name, least in _least(limits).items()):
        report.figures |= remembered
    else:
        speed(plan, limits, report)
    at(scratch, "the store")
    report.faults += reach_store(store, probe_key(plan.attempt_key, report.index), limits, report)


@contextlib.contextmanager
def watched(report: Report, *figures: str) -> Iterator[None]:
    """Notes in `report` whether others took this machine's CPUs while `figures` were looked at."""
    before, own = Clock.read(), time.process_time()
    yield
    after = Clock.read()
    load = before.until(after, time.process_time() - own) if before and after else None
    taken = str(load) if load is not None and load.slowed_us else None
    for figure in figures:
        report.busy[figure] = taken if report.busy.get(figure, taken) else None


def look_again(plan: Plan, limits: PreflightPlan, store: Store, report: Report) -> None:
    """At what is compared with others', which are busy now and then: the best of both looks counts."""
    if report.figures.pop(AGE, None) is not None:
        for name in (*SPEEDS, PEERS):
            report.figures.pop(name, None)
    again = Report(report.index, report.node, report.figures, busy=report.busy)
    speed(plan, limits, again)
    reach_store(store, probe_key(plan.attempt_key, report.index), limits, again)


def disk(scratch: Path, limits: PreflightPlan, report: Report) -> list[str]:
    """Whether `scratch` has room and takes what is written."""
    free = shutil.disk_usage(scratch).free
    report.figures["disk_free_bytes"] = free
    if free < limits.disk_bytes:
        return [
            f"{format_bytes(free)} are free in {scratch}, of {format_bytes(limits.disk_bytes)} that it needs"
        ]
    path = scratch / "preflight-disk"
    try:
        with path.open("wb") as file:
            file.write(bytes(_DISK_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return [f"{scratch} cannot be written: {error.strerror}"]
    finally:
        path.unlink(missing_ok=True)
    return []


def rdma(devices: Path = _RDMA) -> list[str]:
    """Whether a port for it is active, and memory may be pinned: without either, NCCL would fall back to
    sockets or fail when the first ranks meet."""
    ports = {path: path.read_text().strip() for path in sorted(devices.glob("*/ports/*/state"))}
    faults = []
    if not any(state.endswith("ACTIVE") for state in ports.values()):
        told = [f"port {path.parent.name} of {path.parents[2].name} {state}" for path, state in ports.items()]
        faults.append(f"no port for RDMA is active: {', '.join(told) or f'{devices} has no devices'}")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and not may_lock():
        faults.append(
            f"{format_bytes(limit)} of memory may be pinned, and RDMA pins its buffers: ulimit -l unlimited, "
            "or network.pinned_memory in pods"
        )
    return faults


def may_lock() -> bool:
    """By the capability IPC_LOCK (14 in linux/capability.h)."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        effective = next(line for line in lines if line.startswith("CapEff:"))
        return bool(int(effective.split()[1], 16) >> 14 & 1)
    return False


def gpus(expected: int, unread: list[str]) -> list[str]:
    """What `nvidia-smi` says of them, if it is there, and how many of them torch sees. `unread`: takes what a
    driver or a card does not tell, which is no fault."""
    faults = _told_by_smi(expected, unread)
    if not faults and (seen := torch.cuda.device_count()) < expected:
        faults = [f"torch sees {seen} GPUs of {expected}"]
    return faults


def _told_by_smi(expected: int, unread: list[str]) -> list[str]:
    try:
        cards = _smi(unread)
    except FileNotFoundError:
        return []
    except subprocess.TimeoutExpired:
        return [f"nvidia-smi did not answer within {_SMI_SECONDS:.0f} s: a GPU or its driver hangs"]
    except subprocess.CalledProcessError as error:
        words = (error.stdout + error.stderr).strip().splitlines()
        return [f"nvidia-smi ended with {error.returncode}: {words[-1] if words else 'silently'}"]
    faults = []
    if len(cards) < expected:
        faults.append(f"nvidia-smi shows {len(cards)} GPUs of {expected}")
    for card in cards:
        name, errors, slow = f"GPU {card['index']} ({card['name']})", card.get(_ECC), card.get(_SLOW)
        if errors is not None and errors.isdigit() and int(errors):
            faults.append(f"{name} has {errors} memory errors that ECC could not correct")
        if slow == "Active":
            faults.append(f"{name} is slowed down by its hardware (heat or power)")
        for field, value in card.items():
            if value.startswith("[") or value == "N/A":  # [Not Supported], of a slice or without ECC [N/A]
                unread.append(f"{name} does not tell {field}: {value.strip('[]')}")
    return faults


def _smi(unread: list[str]) -> list[dict[str, str]]:
    """Of each GPU the fields that this driver knows, by the newest of their names."""
    asked = {field: field for field in ("index", "name", _ECC, _SLOW)}  # by which name
    while True:
        argv = ["nvidia-smi", f"--query-gpu={','.join(asked.values())}", "--format=csv,noheader,nounits"]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_SMI_SECONDS)
        if done.returncode == 0:
            break
        words = done.stdout + done.stderr  # Field "..." is not a valid field to query.
        refused = next((field for field in (_ECC, _SLOW) if asked.get(field, "\n") in words), None)
        if refused is None:
            done.check_returncode()
        elif asked[refused] != _OLDER.get(refused, refused):
            asked[refused] = _OLDER[refused]
        else:
            del asked[refused]
            unread.append(f"nvidia-smi knows no {refused}")
    rows = [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(asked, row, strict=True)) for row in rows if len(row) == len(asked)]


def speed(plan: Plan, limits: PreflightPlan, report: Report) -> None:
    """Of a matmul and of copies in memory: of the CPUs, or of the slowest of the GPUs; between these; and
    whether one of them reported an error meanwhile. Kept in the report is the best that was seen so far."""
    dtype = DTYPES[plan.work.training.precision]
    devices = [torch.device("cpu")]
    if plan.launch.device == "cuda":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    least, errors = _least(limits), _watch_errors(devices)
    with watched(report, *(SPEEDS if plan.launch.device == "cpu" else ())):  # GPUs are nobody else's
        speeds = [_device_speed(device, dtype) for device in devices]
    figures = {name: min(one[name] for one in speeds) for name in SPEEDS if speeds}
    if len(devices) > 1:
        figures[PEERS] = peer_speed(devices)
    for name, rate in figures.items():
        report.figures[name] = max(report.figures.get(name, 0.0), rate)
    for index, one in enumerate(speeds):
        for name, limit in least.items():
            if one[name] < limit:
                expected = limit / limits.slow_ratio
                report.faults.append(
                    f"GPU {index}: {name} {one[name]:.3g}, of {expected:.3g} by the catalogue"
                )
    report.faults += errors()


def _watch_errors(devices: Sequence[torch.device]) -> Callable[[], list[str]]:
    """The errors (Xid) that the driver reports of these GPUs from now on, where NVML tells them."""
    uuids = [str(torch.cuda.get_device_properties(one).uuid) for one in devices if one.type == "cuda"]
    gpus = [find_gpu(uuid) for uuid in uuids]

    def errors() -> list[str]:
        told = [(index, gpu.read()) for index, gpu in enumerate(gpus) if gpu is not None]
        return [
            f"GPU {index} reported error Xid {value:.0f} while it was tried"
            for index, samples in told
            for name, _, value in samples
            if name == "mlpipe_gpu_last_xid" and value not in _XIDS_OF_PROGRAMS
        ]

    return errors


def peer_speed(devices: Sequence[torch.device]) -> float:
    """Bytes a second from each GPU to the next one of its machine, all at once as round a ring."""
    num_bytes = 2**28 if devices[0].type == "cuda" else 2**20
    sources = [torch.ones(num_bytes, dtype=torch.uint8, device=one) for one in devices]
    targets = [
        torch.empty_like(source, device=one)
        for source, one in zip(sources, (*devices[1:], devices[0]), strict=True)
    ]

    def pass_on() -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        for one in devices:
            if one.type == "cuda":
                torch.cuda.synchronize(one)

    with ThreadPoolExecutor(1) as pool:
        return num_bytes * _rate([pass_on], devices[0], pool)


def _least(limits: PreflightPlan) -> dict[str, float]:
    """Of a GPU, by the catalogue."""
    expected = {
        "flops": limits.expected_flops,
        "memory_bytes_per_second": limits.expected_memory_bytes_per_second,
    }
    return {name: limits.slow_ratio * rate for name, rate in expected.items() if rate is not None}


def _device_speed(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    is_cpu = device.type == "cpu"
    size, num_bytes = (256, 2**24) if is_cpu else (8192, 2**28)
    threads = min(num_cpus(), _MOST_THREADS) if is_cpu else 1

    def multiply() -> Callable[[], object]:
        kind = torch.float32 if is_cpu else dtype
        left, right = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
        product = torch.empty_like(left)
        return lambda: torch.mm(left, right, out=product)

    def copy() -> Callable[[], object]:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return {
                "flops": 2 * size**3 * _rate([multiply() for _ in range(threads)], device, pool),
                "memory_bytes_per_second": 2
                * num_bytes
                * _rate([copy() for _ in range(threads)], device, pool),
            }
    finally:
        torch.set_num_threads(before)


def _rate(works: Sequence[Callable[[], object]], device: torch.device, pool: ThreadPoolExecutor) -> float:
    """Times a second that any of `works` is done, each in a thread of its own."""

    def once(work: Callable[[], object]) -> float:
        done, began = 0, time.perf_counter()
        while (took := time.perf_counter() - began) < _LOOK_SECONDS or not done:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            done += 1
        return done / took

    for work in works:
        work()
    return max(sum(pool.map(once, works)) for _ in range(_LOOKS))


def reach_store(store: Store, key: str, limits: PreflightPlan, report: Report) -> list[str]:
    """Writes, reads and deletes `key` there."""
    sent = secrets.token_bytes(_STORE_BYTES)
    try:
        with watched(report, "store_bytes_per_second"):
            began, at = time.perf_counter(), time.time()
            store.put(key, sent)
            put = time.time()
            received = store.get(key)
            took = time.perf_counter() - began
        if "://" in store.url:  # a folder's times are this machine's own
            changed = [info.modified for info in store.list(key.rpartition("/")[0]) if info.key == key]
            report.store_clock_seconds = (at + put) / 2 - changed[0] if changed else None
        store.delete([key])
    except StoreError as error:
        return [f"the store cannot be used: {error.message}"]
    if received != sent:
        return ["the store gave back other bytes than were written"]
    rate = 2 * _STORE_BYTES / took
    report.figures["store_bytes_per_second"] = max(rate, report.figures.get("store_bytes_per_second", 0.0))
    if rate < limits.store_bytes_per_second:
        return [f"store {rate / 1e6:.3g} MB/s, of {limits.store_bytes_per_second / 1e6:.3g} that it needs"]
    return []
