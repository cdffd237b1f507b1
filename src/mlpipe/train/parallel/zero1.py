"""zero1: DDP's forward and backward, but each rank keeps optimizer states for, and updates, one slice of
each parameter along dim 0; the slices are gathered after the step (Rajbhandari et al., ZeRO, 2020).

The slices are torch.chunk's, so the states have the very boxes that FSDP2's have and a checkpoint of
one resumes under the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from mlpipe.train.parallel.ddp import apply_ddp
from mlpipe.train.parallel.parallel import Owned, Parallel

_BUCKET_BYTES = 64 * 2**20


def apply_zero1(module: nn.Module, device: torch.device) -> Parallel:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parallel = apply_ddp(module, device)
    whole = [item for item in parallel.owned if not item.is_buffer]
    parallel.owned = [item if item.is_buffer else _slice(item, rank, world_size) for item in parallel.owned]
    gather = _gatherer([item.local for item in whole], rank, world_size)
    parallel.after_step = parallel.waits.timed(gather)
    return parallel


def _slice(item: Owned, rank: int, world_size: int) -> Owned:
    if not item.shape:  # a scalar has no dim 0: every rank updates it alike
        return item
    start, stop = _rows(item.shape[0], rank, world_size)
    offset = (start, *item.offset[1:])
    return Owned(
        item.name, item.local[start:stop], item.shape, offset, 1, 0, item.parameter, full_gradient=True
    )


def _rows(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    per_rank = math.ceil(num_rows / world_size)
    return min(rank * per_rank, num_rows), min((rank + 1) * per_rank, num_rows)


def _gatherer(tensors: list[torch.Tensor], rank: int, world_size: int) -> Callable[[], None]:
    """All-gathers the slices of `tensors` in place, a bucket of parameters at a time: one collective per
    64 MiB instead of one per parameter."""
    exchanges = [_Exchange(bucket, rank, world_size) for bucket in _buckets(tensors)]

    def gather() -> None:
        for exchange in exchanges:
            exchange.run()

    return gather


def _buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    buckets: list[list[torch.Tensor]] = []
    size_bytes = 0
    for tensor in tensors:
        if tensor.dim() == 0:
            continue
        if not buckets or size_bytes + tensor.nbytes > _BUCKET_BYTES or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            size_bytes = 0
        buckets[-1].append(tensor)
        size_bytes += tensor.nbytes
    return buckets


class _Exchange:
    """One bucket's buffers, made once: slices are packed, gathered and unpacked by fused copies."""

    def __init__(self, bucket: list[torch.Tensor], rank: int, world_size: int) -> None:
        by_rank = [
            [tensor[slice(*_rows(tensor.shape[0], r, world_size))].view(-1) for tensor in bucket]
            for r in range(world_size)
        ]
        # rank 0 has the most rows of every tensor
        length = sum(view.numel() for view in by_rank[0])
        self.sent = torch.empty(length, dtype=bucket[0].dtype, device=bucket[0].device)
        self.received = self.sent.new_empty(world_size * length)
        self.own = by_rank[rank]
        self.packed = _cut(self.sent, self.own)
        others = [r for r in range(world_size) if r != rank]
        self.unpacked = [view for r in others for view in by_rank[r]]
        self.arrived = [part for r in others for part in _cut(self.received[r * length :], by_rank[r])]

    @torch.no_grad()
    def run(self) -> None:
        torch._foreach_copy_(self.packed, self.own)
        dist.all_gather_into_tensor(self.received, self.sent)
        torch._foreach_copy_(self.unpacked, self.arrived)


def _cut(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    sizes = [view.numel() for view in like]
    return list(flat[: sum(sizes)].split(sizes))
