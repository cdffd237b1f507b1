"""Before hours are spent: a pass of a model of one's own without memory, which shows what it returns; two
passes of the plan at full shape, and what they needed beside what there is.

Nothing that counts is touched: no update is made, gradients and buffers are put back, every step seeds its
own randomness, and the position in the data is a number that only steps move.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mlpipe._core.errors import TrainError
from mlpipe._core.units import format_bytes
from mlpipe.plan.plan import TrainPlan
from mlpipe.train.contract import check_call
from mlpipe.train.data import collate
from mlpipe.train.model import Batch
from mlpipe.train.optim import Optimizer
from mlpipe.train.parallel.parallel import ParallelizedModel

_log = logging.getLogger(__name__)


def try_out(plan: TrainPlan, model: torch.nn.Module, dataset: Any) -> float | None:
    """FLOPs a token, as the plan says or counted. Raises TrainError (input) if the model and its data break a
    rule of the contract, as far as that shows on the meta device; the first pass looks again."""
    sample = collate(dataset, np.zeros(2, dtype=np.int64))
    check_call(model, sample, plan.model.build.entry)
    if plan.num_flops_per_token is not None:
        return plan.num_flops_per_token
    from mlpipe.train.flops import count_flops_per_token

    return count_flops_per_token(plan.model, collated=sample)


def is_due(plan: TrainPlan, device: torch.device) -> bool:
    """On a GPU always; on CPU where the plan uses more than half of what there is, or does not know."""
    if plan.memory_bytes is None:
        return False
    if device.type != "cpu" or plan.predicted is None:
        return True
    return plan.predicted.memory_bytes > plan.memory_bytes / 2


def warm_up(
    plan: TrainPlan,
    parallel: ParallelizedModel,
    optimizer: Optimizer,
    batch: Callable[[int], Batch],
    device: torch.device,
) -> TrainPlan:
    """The plan that fits: the given one, or one with the next smaller of its `smaller_micro_batches`.
    `batch(size)`: a microbatch on the device. All ranks go the same way. Raises TrainError (input) when
    nothing fits."""
    limit = plan.memory_bytes or 0
    optimizer.state()  # the moments, as every later pass finds them
    while True:
        needed = _needs(parallel, batch(plan.micro_batch), plan.accumulation > 1, device)
        worst = torch.tensor(needed, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        most = float(worst)
        told = plan.predicted
        said = f", the plan said {format_bytes(told.memory_bytes)}" if told is not None else ""
        if most <= limit:
            _log.info("warm-up: needs %s of %s%s", format_bytes(most), format_bytes(limit), said)
            return plan
        shown = "more than there is" if most == float("inf") else format_bytes(most)
        found = f"a pass of micro_batch {plan.micro_batch} needs {shown} of {format_bytes(limit)}{said}"
        smaller = plan.smaller_micro_batches
        # A pass that broke off leaves FSDP in the middle of a gathering.
        if not smaller or (most == float("inf") and plan.mesh.dp_shard > 1):
            size = f"micro_batch: {smaller[0]}" if smaller else "activation_checkpointing: full"
            raise TrainError(
                found, where="warm-up", hint=f"write {size}, or use more or larger devices", kind="input"
            )
        _log.warning("warm-up: %s; going on with micro_batch %d", found, smaller[0])
        factor = plan.micro_batch // smaller[0]
        plan = replace(
            plan,
            micro_batch=smaller[0],
            accumulation=plan.accumulation * factor,
            smaller_micro_batches=smaller[1:],
        )
        parallel.module.zero_grad(set_to_none=True)


def _needs(parallel: ParallelizedModel, batch: Batch, accumulates: bool, device: torch.device) -> float:
    """Bytes of this process at the peak of two steps; infinite when the device has no more."""
    _forget_peak(device)
    try:
        rehearse(parallel, batch, accumulates=accumulates)
    except torch.OutOfMemoryError:
        return float("inf")
    return float(_peak_bytes(device))


def rehearse(parallel: ParallelizedModel, batch: Batch, *, accumulates: bool = False) -> None:
    """DDP sorts its buckets anew after the first backward, which changes the order of additions: a resumed
    run equals an uninterrupted one bit for bit only if both have done so before the first step that
    counts. Two passes, then everything they left is undone. `accumulates`: as in a step of several
    microbatches, whose gradients wait for the last one."""
    buffers = [(item.local, item.local.clone()) for item in parallel.owned if item.is_buffer]
    try:
        for _ in range(2):
            for last in (False, True) if accumulates else (True,):
                with parallel.gradient_sync(last):
                    parallel.module(batch)[0].backward()
            parallel.module.zero_grad(set_to_none=True)
    finally:
        parallel.waits.take()
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
