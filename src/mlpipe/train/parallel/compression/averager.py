"""What averages tensors over ranks without sending all of them, and keeps what it did not send for the next
time (error feedback: Seide et al., 2014; Karimireddy et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from mlpipe._core.compression import BLOCK, COMPRESSIONS
from mlpipe.plan.updates import CompressPlan
from mlpipe.train.parallel.rank_group import RankGroup


@dataclass
class Link:
    """The ranks that average. `sent_bytes`: what this rank has given to others in a step."""

    ranks: RankGroup
    sent_bytes: int = 0

    def all_reduced_bytes(self, num_bytes: int) -> int:
        """What a rank sends in a ring that sums a tensor of so many bytes."""
        return 2 * num_bytes * (self.ranks.num_ranks - 1) // self.ranks.num_ranks

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum, in place."""
        self.sent_bytes += self.all_reduced_bytes(tensor.nbytes)
        return self.ranks.all_reduce(tensor)

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Row r goes to rank r; back comes a row from each."""
        num_ranks = self.ranks.num_ranks
        self.sent_bytes += rows.nbytes // num_ranks * (num_ranks - 1)
        return self.ranks.all_to_all(rows)

    def all_gather(self, row: Tensor) -> Tensor:
        """The rows (1, ...) of all ranks."""
        self.sent_bytes += row.nbytes * (self.ranks.num_ranks - 1)
        return self.ranks.all_gather(row)


class Averager(Protocol):
    """Averages the tensors of one bucket."""

    def mean(self, unsent: Tensor, link: Link) -> Tensor:
        """`unsent`: fp32 (padded length,), what this rank has to say; afterwards what of it nobody was told,
        such that mean(before) = result + mean(after) over the ranks, to rounding. The result is of the same
        length, and the same bits on every rank. What is not finite on one rank is not on all."""
        ...

    def states(self) -> dict[int, Tensor]:
        """What else outlives a step, the same on every rank, by the number of the tensor in the bucket."""
        ...


class Code(Protocol):
    """Numbers of a row as bytes."""

    def encode(self, rows: Tensor) -> Tensor:
        """fp32 (R, L), L a multiple of BLOCK, to uint8 (R, B)."""
        ...

    def decode(self, codes: Tensor, length: int) -> Tensor:
        """uint8 (R, B) to fp32 (R, `length`). A row whose values are not all finite gives values that are
        not."""
        ...


def padded(length: int, num_ranks: int) -> int:
    """So that each rank has the same number of whole blocks."""
    unit = BLOCK * num_ranks
    return -(-length // unit) * unit


def coded_mean(unsent: Tensor, code: Code, link: Link) -> Tensor:
    """As `Averager.mean` of a length that `padded` gives: each rank sums up its own part of what all send it
    in codes, and sends the mean in codes, which all decode alike (Tang et al., DoubleSqueeze, 2019). Of its
    own part a rank keeps what the code of the mean lacks, times the number of ranks: so that one tensor holds
    both errors."""
    ranks, length = link.ranks, unsent.numel() // link.ranks.num_ranks
    parts = unsent.view(ranks.num_ranks, length)
    codes = code.encode(parts)
    received = code.decode(link.all_to_all(codes), length)
    received[ranks.rank] = parts[ranks.rank]
    mean = received.sum(0, keepdim=True).div_(ranks.num_ranks)
    parts.sub_(code.decode(codes, length))
    told = code.encode(mean)
    parts[ranks.rank] = (mean - code.decode(told, length))[0] * ranks.num_ranks
    return code.decode(link.all_gather(told), length).view(-1)


@dataclass(frozen=True)
class Coded:
    """Sends every value, in fewer bits."""

    code: Code

    def mean(self, unsent: Tensor, link: Link) -> Tensor:
        """As the protocol says."""
        return coded_mean(unsent, self.code, link)

    def states(self) -> dict[int, Tensor]:
        """None."""
        return {}


MakeAverager = Callable[[Sequence[Tensor]], Averager]


def averager_maker(plan: CompressPlan) -> MakeAverager:
    """Of buckets, each by its tensors; of these only the shapes count."""
    module, _, function = COMPRESSIONS[plan.name].build.partition(":")
    build: Callable[..., MakeAverager] = getattr(import_module(module), function)
    return build(**plan.args)


def code_of(name: str) -> Code:
    """By its name among `CODES`."""
    made: Any = averager_maker(CompressPlan(name))([torch.empty(0)])
    assert isinstance(made, Coded)
    return made.code
