"""The axes `dp_replicate` and `cp` where nothing is sharded: every rank holds all parameters, and
DistributedDataParallel averages the gradients bucket by bucket during the backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.buffers import reading
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.without_dynamo import no_dynamo_in_ddp
from mlpipe.train.world import World

# The switch for buffers has a new name since torch 2.15, and the old one warns on every rank.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else "broadcast_buffers"
)


def apply(model: ParallelizedModel, world: World, plan: TrainPlan) -> None:
    """Wraps the module; its gradients are views of DDP's buckets afterwards."""
    plain = model.module
    wrapped: DistributedDataParallel | None = None

    def wrap(bucket_bytes: int | None) -> None:
        nonlocal wrapped
        if wrapped is not None:  # with the last that hold its reducer go that one's hooks of the parameters
            plain.zero_grad(set_to_none=True)
            wrapped.reducer = wrapped.logger = None  # type: ignore[assignment]
        model.module = wrapped = _wrapped(plain, model, world, bucket_bytes)

    @contextmanager
    def gradient_sync(last: bool) -> Iterator[None]:
        assert wrapped is not None
        with nullcontext() if last else wrapped.no_sync():
            yield
        model.waits.end()

    def sync_again() -> None:
        """A forward pass without a backward makes DDP believe that the next one need not send the buffers."""
        assert wrapped is not None
        wrapped.require_forward_param_sync = True

    wrap(None if plan.buckets == "auto" else plan.buckets)
    model.set_buckets, model.gradient_sync, model.after_evaluation = wrap, gradient_sync, sync_again


def _wrapped(
    plain: nn.Module, model: ParallelizedModel, world: World, bucket_bytes: int | None
) -> DistributedDataParallel:
    has_buffers = any(item.is_buffer for item in model.shards)
    # Parameters need no initial broadcast: a seed gives the same weights on every rank (train/init.py).
    switches: dict[str, Any] = {_SYNC_BUFFERS: has_buffers, "process_group": world.group("dp_replicate+cp")}
    if bucket_bytes is not None:
        switches["bucket_cap_mb"] = bucket_bytes / 2**20
    with no_dynamo_in_ddp():
        wrapped = DistributedDataParallel(plain, gradient_as_bucket_view=True, init_sync=False, **switches)
    waits = model.waits
    waits.time_end_of_backward(wrapped)
    send, reads = waits.timed(wrapped._sync_buffers), reading(plain)
    wrapped._sync_buffers = lambda: send() if reads() else None  # type: ignore[method-assign]
    return wrapped
