"""Before hours are spent: two steps of the plan at full shape, and what they needed beside what there is.

Nothing that counts is touched: no update is made, gradients and buffers are put back, every step seeds its
own randomness, and the position in the data is a number that only steps move.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from mlpipe._core.errors import TrainError
from mlpipe._core.units import format_bytes
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.schedules import Schedule

_log = logging.getLogger(__name__)


def is_due(plan: TrainPlan, device: torch.device) -> bool:
    """On a GPU always; on CPU where the plan uses more than half of what there is, or does not know."""
    if plan.memory_bytes is None:
        return False
    if device.type != "cpu" or plan.predicted is None:
        return True
    return plan.predicted.memory_bytes > plan.memory_bytes / 2


def fitting_plan(
    plan: TrainPlan,
    model: ParallelizedModel,
    schedule: Schedule,
    first_step: Callable[[int], Sequence[Microbatch]],
    device: torch.device,
) -> TrainPlan:
    """The given plan if it fits, or one with the next smaller of its `smaller_micro_batches`. `first_step`:
    the microbatches of a step, by the micro-batch size. All ranks go the same way. Raises TrainError (input)
    when nothing fits."""
    limit = plan.memory_bytes or 0
    while True:
        # of several microbatches the second finds the gradients of the first; a pipeline holds many at once
        most_held = 2 if plan.mesh.pp == 1 else None
        needed = _needs(model, schedule, first_step(plan.micro_batch)[:most_held], device)
        worst = torch.tensor(needed, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        most = float(worst)
        told = plan.predicted
        said = f", the plan said {format_bytes(told.memory_bytes)}" if told is not None else ""
        if most <= limit:
            _log.info("memory probe: needs %s of %s%s", format_bytes(most), format_bytes(limit), said)
            return plan
        shown = "more than there is" if most == float("inf") else format_bytes(most)
        problem = f"micro-batch size {plan.micro_batch} needs {shown} of {format_bytes(limit)}{said}"
        smaller = plan.smaller_micro_batches
        # A pass that broke off leaves FSDP in the middle of a gathering.
        if not smaller or (most == float("inf") and plan.mesh.dp_shard > 1):
            size = f"micro_batch: {smaller[0]}" if smaller else "activation_checkpointing: full"
            raise TrainError(
                problem,
                where="memory probe",
                hint=f"write {size}, or use more or larger devices",
                kind="input",
            )
        _log.warning("memory probe: %s; going on with micro_batch %d", problem, smaller[0])
        factor = plan.micro_batch // smaller[0]
        plan = plan._replace(
            micro_batch=smaller[0],
            accumulation=plan.accumulation * factor,
            smaller_micro_batches=smaller[1:],
        )
        model.module.zero_grad(set_to_none=True)


def _needs(
    model: ParallelizedModel, schedule: Schedule, batches: Sequence[Microbatch], device: torch.device
) -> float:
    """Bytes of this process at the peak of two steps; infinite when the device has no more."""
    _forget_peak(device)
    try:
        dry_steps(model, schedule, batches)
    except torch.OutOfMemoryError:
        return float("inf")
    return float(_peak_bytes(device))


def dry_steps(model: ParallelizedModel, schedule: Schedule, batches: Sequence[Microbatch]) -> None:
    """Two steps without an update, then everything they left is undone. DDP sorts its buckets anew after the
    first backward, which changes the order of additions: a resumed run equals an uninterrupted one bit for
    bit only if both have done so before the first step that counts."""
    with undone(model):
        for _ in range(2):
            schedule.forward_backward(batches)
            model.module.zero_grad(set_to_none=True)


@contextmanager
def undone(model: ParallelizedModel) -> Iterator[None]:
    """What passes inside write, but for gradients, is put back."""
    kept = [] if model.kept is None else model.kept.state()
    written = [*(item for item in model.shards if item.is_buffer), *kept]
    buffers = [(item.local, item.local.clone()) for item in written]
    try:
        yield
    finally:
        model.waits.take()
        for buffer, before in buffers:
            buffer.copy_(before)


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM, see proc(5)


def _peak_bytes(device: torch.device) -> int:
    """Of the process: on CUDA what the allocator reserved at most, and what of the device is used besides."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        besides = total - free - torch.cuda.memory_reserved(device)
        return torch.cuda.max_memory_reserved(device) + max(0, besides)
    # less the libraries' pages, which the kernel takes back before it kills for memory
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak, files = (int(status.get(key, "0 kB").split()[0]) for key in ("VmHWM", "RssFile"))
    return max(0, peak - files) * 1024
