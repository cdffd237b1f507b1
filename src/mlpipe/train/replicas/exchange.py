"""What replicas send each other: sums of gradients, and the state that heals one that is behind. Rank i of a
replica talks to rank i of the others, over a process group that lives as long as the quorum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mlpipe.train.buckets import buckets, views
from mlpipe.train.parallel.rank_group import RankGroup
from mlpipe.train.replicas.member import Member

_BUCKET_BYTES = 25 * 2**20
_PIECE_BYTES = 4 * 2**20  # of what travels over slower links; a bucket may be one tensor of any size
# An operation begins when all are ready for it: what takes longer has lost somebody. The slowest link that
# is waited for carries so many bytes a second.
_LOST_SECONDS = 15.0
_LEAST_BYTES_PER_SECOND = 10**6


class MembershipChanged(Exception):  # no error: the step is taken again
    """The quorum is void, and nothing was updated."""


class Exchange:
    """Of one quorum. `index`: this replica's place among its `size` members."""

    def __init__(self, member: Member, quorum: int, index: int, size: int) -> None:
        """Raises MembershipChanged."""
        self._group: dist.ProcessGroup | None = None
        self._member = member
        self.ranks = _Ranks(index, size, None, lambda function: function, self._do)
        if size > 1:
            seconds = _LOST_SECONDS + _BUCKET_BYTES / _LEAST_BYTES_PER_SECOND
            values = _Values(member, quorum)
            self._group = self._try(
                lambda: dist.ProcessGroupGloo(values, index, size, timedelta(seconds=seconds))
            )

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Over the replicas, in place; bit-equal on all of them. Raises MembershipChanged, with some of the
        tensors summed."""
        if self._group is None:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            # one after the other: a group with nothing under way closes its connections at once, by which
            # the others hear of it
            for part in flat.split(_BUCKET_BYTES // flat.element_size()):
                self._do("allreduce", [part])
            for tensor, part in zip(bucket, views(flat, bucket), strict=True):
                tensor.copy_(part)

    def send(self, tensors: Sequence[torch.Tensor], to: int) -> None:
        """To the member with that index. Raises MembershipChanged."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in bucket])
            for part in flat.cpu().split(_PIECE_BYTES):
                self._do("send", [part], to, 0)

    def receive(self, tensors: Sequence[torch.Tensor], of: int) -> None:
        """Into tensors of the same shapes. Raises MembershipChanged, with some of them overwritten."""
        for bucket in _buckets(tensors):
            flat = torch.empty(sum(one.nbytes for one in bucket), dtype=torch.uint8)
            for piece in flat.split(_PIECE_BYTES):
                self._do("recv", [piece], of, 0)
            for tensor, part in zip(bucket, flat.split([one.nbytes for one in bucket]), strict=True):
                tensor.copy_(part.view(tensor.dtype).view(tensor.shape))

    def _do(self, what: str, *arguments: Any) -> None:
        self._try(lambda: getattr(self._group, what)(*arguments).wait())
        self._member.beat()  # who has come so far is not stuck

    def _try(self, action: Any) -> Any:
        try:
            return action()
        except (RuntimeError, MembershipChanged) as error:
            self._group = None
            text = str(error).splitlines()[0]
        raise MembershipChanged(text)  # outside, so that nothing of the group outlives it


@dataclass(frozen=True)
class _Ranks(RankGroup):
    """The members of a quorum, to what compresses. Raises MembershipChanged."""

    do: Callable[..., None]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """As over any ranks."""
        for part in tensor.split(_PIECE_BYTES // tensor.element_size()) if self.num_ranks > 1 else ():
            self.do("allreduce", [part])
        return tensor

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """As over any ranks."""
        if self.num_ranks == 1:
            return part
        whole = part.new_empty((self.num_ranks * part.shape[0], *part.shape[1:]), device="cpu")
        self._in_pieces("_allgather_base", whole.view(self.num_ranks, -1), part.cpu().reshape(1, -1))
        return whole.to(part.device)

    def all_to_all(self, rows: torch.Tensor) -> torch.Tensor:
        """As over any ranks."""
        if self.num_ranks == 1:
            return rows
        received = torch.empty_like(rows, device="cpu", memory_format=torch.contiguous_format)
        own = rows.cpu().contiguous().view(self.num_ranks, -1)
        self._in_pieces("alltoall_base", received.view(self.num_ranks, -1), own, [], [])
        return received.to(rows.device)

    def _in_pieces(self, what: str, received: torch.Tensor, sent: torch.Tensor, *more: Any) -> None:
        """Into columns of `received` those of `sent`."""
        for into, own in zip(_pieces(received), _pieces(sent), strict=True):
            came = torch.empty_like(into, memory_format=torch.contiguous_format)
            self.do(what, came, own.contiguous(), *more)
            into.copy_(came)


def _pieces(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Columns of them, views, of as many bytes a row as travel at once."""
    return rows.split(_PIECE_BYTES // rows.element_size(), dim=1)


class _Values(dist.Store):
    """The coordinator's, as gloo wants a store."""

    def __init__(self, member: Member, quorum: int) -> None:
        super().__init__()
        self._member, self._quorum = member, quorum

    def set(self, key: str, value: bytes) -> None:
        name = f"{self._member.rank}/{key}"
        self._member.ask("set", quorum=self._quorum, key=name, value=bytes(value).hex())

    def get(self, key: str) -> bytes:
        reply = self._member.ask("get", quorum=self._quorum, key=f"{self._member.rank}/{key}")
        if "value" not in reply:
            raise RuntimeError("the quorum is void")
        return bytes.fromhex(reply["value"])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    return buckets((one for one in tensors if one.numel()), _BUCKET_BYTES, lambda tensor: tensor)
