"""The largest values of a bucket (Aji and Heafield, Sparse Communication for Distributed Gradient Descent,
2017; Stich et al., Sparsified SGD with Memory, 2018): each rank tells its own, and what nobody told stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlpipe.train.parallel.compression.averager import Averager, Link, MakeAverager


def topk(ratio: float) -> MakeAverager:
    """Of buckets of any tensors; `ratio`: of the values that are sent."""

    def make(tensors: Sequence[Tensor]) -> Averager:
        return _TopK(max(1, round(ratio * sum(tensor.numel() for tensor in tensors))))

    return make


@dataclass(frozen=True)
class _TopK:
    """`number`: of values that a rank sends of a bucket: bf16, and where they are in 32 bits."""

    number: int

    def mean(self, unsent: Tensor, link: Link) -> Tensor:
        """As the protocol says."""
        # sorted by place, so that sums have one order; nan counts as the largest
        places = unsent.abs().topk(self.number, sorted=False).indices.sort().values
        values = unsent[places].bfloat16()
        row = torch.cat([places.int().view(torch.uint8), values.view(torch.uint8)])[None]
        result = torch.zeros_like(unsent)
        for told in link.all_gather(row):  # clones: views of other dtypes must be aligned
            theirs = told[: 4 * self.number].clone().view(torch.int32).long()
            result[theirs] += told[4 * self.number :].clone().view(torch.bfloat16).float()
        unsent[places] -= values.float()
        return result.div_(link.ranks.num_ranks)

    def states(self) -> dict[int, Tensor]:
        """None."""
        return {}
