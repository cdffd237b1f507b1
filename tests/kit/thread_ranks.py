"""Ranks that are threads of one process, for what averages over them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mlpipe.train.parallel.compression.averager import Link
from mlpipe.train.parallel.rank_group import RankGroup


class _Ranks(RankGroup):
    """Ranks that are threads of this process."""

    meeting: Any

    def _told(self, tensor: Tensor) -> list[Tensor]:
        barrier, table = self.meeting
        table[self.rank] = tensor
        barrier.wait(60)
        told = [table[rank] for rank in range(self.num_ranks)]
        barrier.wait(60)
        return told

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._told(part))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(torch.stack(self._told(tensor.clone())).sum(0))

    def all_to_all(self, rows: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._told(rows)])


def on_ranks(num_ranks: int, work: Callable[[Link], Any]) -> list[Any]:
    """What `work` gives on each of so many ranks."""
    meeting: Any = threading.Barrier(num_ranks), {}
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        ranks = _Ranks(rank, num_ranks, None, lambda function: function)
        object.__setattr__(ranks, "meeting", meeting)
        found[rank] = work(Link(ranks))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[rank] for rank in range(num_ranks)]
