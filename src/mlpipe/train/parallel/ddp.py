"""ddp: every rank holds all parameters, gradients are averaged bucket by bucket during the backward.

`single` is the same without the communication.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlpipe.train.parallel.parallel import Parallel, nothing, replicated
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.without_dynamo import no_dynamo_in_ddp

# The switch for buffers has a new name since torch 2.15, and the old one warns on every rank.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def apply_single(module: nn.Module) -> Parallel:
    return Parallel(
        module=module,
        owned=replicated(module, 0, 1),
        communicate=lambda last: nullcontext(),
        gradients=lambda: [p.grad for p in module.parameters() if p.grad is not None],
        norm_copies=1,
        after_step=nothing,
    )


def apply_ddp(module: nn.Module, device: torch.device) -> Parallel:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    owned = replicated(module, rank, world_size)
    has_buffers = any(item.is_buffer for item in owned)
    # Parameters need no initial broadcast: a seed gives the same weights on every rank (train/init.py).
    switches: dict[str, Any] = {_SYNC_BUFFERS: has_buffers}
    with no_dynamo_in_ddp():
        wrapped = DistributedDataParallel(module, gradient_as_bucket_view=True, init_sync=False, **switches)
    waits = Waits(device)
    waits.time_end_of_backward(wrapped)
    wrapped._sync_buffers = waits.timed(wrapped._sync_buffers)  # type: ignore[method-assign]

    @contextmanager
    def communicate(last: bool) -> Iterator[None]:
        with nullcontext() if last else wrapped.no_sync():
            yield
        waits.end()

    return Parallel(
        module=wrapped,
        owned=owned,
        communicate=communicate,
        gradients=lambda: [p.grad for p in module.parameters() if p.grad is not None],
        norm_copies=world_size,
        after_step=nothing,
        waits=waits,
    )
