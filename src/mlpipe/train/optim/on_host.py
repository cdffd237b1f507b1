"""An optimizer on the host: its states stay there, and the CPUs update. Gradients and weights of this rank's
shards are copied down, and the updated weights up. It updates by what the device has, so that whoever else
changes weights there (a checkpoint that is loaded, an outer step) need not be heard of.

From and to a GPU copies go by pinned memory (tested in the ring `gpu`); on CPUs a copy is one more tensor of
the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from mlpipe.train.optim.update import Update, after_load, finish
from mlpipe.train.shards import LocalShard


@dataclass
class HostShard(LocalShard):
    """The same part, on the host. `copied`: its gradient there; None: it has none in this step."""

    copied: torch.Tensor | None = None
    room: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # for gradients

    @staticmethod
    def of(shard: LocalShard) -> HostShard:
        kept = {one.name: getattr(shard, one.name) for one in fields(shard)}
        pinned: dict[str, Any] = {"device": "cpu", "pin_memory": shard.local.is_cuda}
        local, room = (torch.empty_like(shard.local, **pinned) for _ in range(2))
        host = HostShard(**kept, room=room)
        host.local = local.copy_(shard.local)
        return host

    def gradient(self) -> torch.Tensor | None:
        """On the host."""
        return self.copied


class OnHost:
    """`build(shards)` makes the optimizer, of `shards` as they are on the host."""

    def __init__(self, shards: Sequence[LocalShard], build: Callable[[Sequence[LocalShard]], Update]) -> None:
        self.pairs = [(shard, HostShard.of(shard)) for shard in shards]
        self.update = build([host for _, host in self.pairs])
        self._on_gpu = any(shard.local.is_cuda for shard in shards)

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update on the host, of what the device has."""
        for shard, host in self.pairs:
            gradient = shard.gradient()
            host.copied = None if gradient is None else host.room.copy_(gradient, non_blocking=True)
            host.local.copy_(shard.local, non_blocking=True)
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()
        self.update.step(lr=lr, scale=scale)
        for shard, host in self.pairs:
            shard.local.copy_(host.local, non_blocking=True)

    def state(self) -> list[LocalShard]:
        """The optimizer's own."""
        return self.update.state()

    def after_load(self) -> None:
        """The optimizer's own."""
        after_load(self.update)

    def finish(self) -> None:
        """The optimizer's own."""
        finish(self.update)

    def scalars(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.update.scalars()

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them."""
        self.update.load_scalars(scalars)
