"""Sums of gradients over replicas in fewer bytes, with error feedback (`compression/averager.py`). What a
replica has not told is its own: who comes has nothing to tell but its gradients, and what one had not told
that is lost is lost with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlpipe.plan.sizes import DDP_BUCKET_BYTES
from mlpipe.plan.updates import CompressPlan
from mlpipe.train.buckets import buckets, views
from mlpipe.train.parallel.compression.averager import Link, averager_maker, padded


class CompressedSums:
    """Of the same tensors each time."""

    def __init__(self, plan: CompressPlan) -> None:
        self._make = averager_maker(plan)
        self._unsent: list[Tensor] = []  # by bucket
        self._left: list[Tensor] = []
        self._sent_bytes = self._plain_bytes = 0

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor], link: Link) -> None:
        """Over the ranks of the link, in place; bit-equal on all of them. What was not told then is told the
        next time, once `commit` was called. Raises what the link does, with some of the tensors summed."""
        self._left, num_ranks = [], link.ranks.num_ranks
        for number, bucket in enumerate(buckets(tensors, DDP_BUCKET_BYTES, lambda tensor: tensor)):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).float()
            if self._unsent:
                flat += self._unsent[number]
            if num_ranks > 1:
                whole = F.pad(flat, (0, padded(len(flat), num_ranks) - len(flat)))
                total = self._make(bucket).mean(whole, link)[: len(flat)] * num_ranks
                left = whole[: len(flat)]
            else:
                total, left = flat, torch.zeros_like(flat)
            self._left.append(left)
            for tensor, part in zip(bucket, views(total, bucket), strict=True):
                tensor.copy_(part)
        self._sent_bytes = link.sent_bytes
        self._plain_bytes = link.all_reduced_bytes(4 * sum(len(left) for left in self._left))

    def commit(self) -> None:
        """The step counts for all who summed."""
        self._unsent = self._left

    def end_step(self) -> dict[str, Any]:
        """As of `CompressedGradients`."""
        return {"exchanged_bytes": self._sent_bytes, "exchanged_plain_bytes": self._plain_bytes}
