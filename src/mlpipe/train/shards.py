"""What a rank holds of a tensor: the one thing that techniques, optimizers and checkpoints tell each other.

The optimizer never sees a DTensor: each rank updates plain local tensors, views of the storage it owns.
That is one code path for replicated and sharded training and keeps DTensor's dispatch out of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mlpipe.train.slices import Slice


@dataclass(frozen=True)
class Split:
    """Over which ranks the rows (dim 0) of a tensor are split: this is `rank` of `num_ranks`, of the process
    group `group` (None: the default one). `timed` wraps a collective, so that it counts as waiting."""

    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    timed: Callable[[Callable[..., Any]], Callable[..., Any]]


def rows_of(num_rows: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """First and last + 1 of the rows that a rank has, as torch.chunk cuts them, and FSDP2."""
    per_rank = -(-num_rows // num_ranks)
    return min(rank * per_rank, num_rows), min((rank + 1) * per_rank, num_rows)


def local_part(tensor: Any) -> torch.Tensor:
    """What DTensor leaves this rank of it; a plain tensor as it is."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@dataclass
class LocalShard:
    """The part of one tensor that this rank updates (parameters, states) or at least stores (`is_buffer`: a
    forward may write it at any time).

    `local` is a view of the live storage. It covers `offset` .. `offset + local.shape` of the global tensor
    of shape `shape`. `num_replicas` ranks hold this very part, this one being number `replica_id` of them.
    `parameter`: the module's own, whose `grad` is there after a backward. `full_gradient`: that gradient has
    the parameter's global shape although only this part is updated (zero1). `split`: the ranks that have the
    other rows; None: this one has all. `slices`: what a technique had cut before: `split` is then of the rows
    of that part. `in_block`: of one of the model's blocks. `decays`: whether weight decay applies; None: to
    matrices, not to vectors (norms, biases). `is_copy`: a rank of another pipeline stage updates the very
    same part; there it counts in sums, and is stored. `num_matrices`: that lie in the whole tensor one below
    the other, as those of experts; no slice cuts one.
    """

    name: str
    local: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica_id: int = 0
    num_replicas: int = 1
    parameter: nn.Parameter | None = None
    full_gradient: bool = False
    is_buffer: bool = False
    split: Split | None = None
    slices: tuple[Slice, ...] = ()
    in_block: bool = False
    decays: bool | None = None
    is_copy: bool = False
    num_matrices: int = 1

    @property
    def is_trained(self) -> bool:
        """Whether the optimizer updates it."""
        return self.parameter is not None and self.parameter.requires_grad

    @property
    def is_decayed(self) -> bool:
        """By weight decay, if there is any."""
        return len(self.shape) >= 2 if self.decays is None else self.decays

    @property
    def first_row(self) -> int:
        """Of the slice, in the global tensor."""
        return sum(cut.rank * (self.shape[0] // cut.num_ranks) for cut in self.slices if cut.dim == 0)

    def gradient(self) -> torch.Tensor | None:
        """Of `local`, after a backward; None where the parameter took no part in it."""
        gradient = self.parameter.grad if self.parameter is not None else None
        if gradient is None:
            return None
        own = local_part(gradient)
        if not self.full_gradient:
            return own
        first = self.offset[0] - self.first_row
        return own[first : first + self.local.shape[0]]

    def state(self, kind: str, local: torch.Tensor) -> LocalShard:
        """A state of the optimizer that has the shape of this parameter and is split like it."""
        return self.state_like(kind, local, self.shape, self.offset)

    def state_like(
        self, kind: str, local: torch.Tensor, shape: tuple[int, ...], offset: tuple[int, ...]
    ) -> LocalShard:
        """A state of another global shape, of which this rank has `local` from `offset` on: split along dim 0
        like the parameter."""
        name = f"optim.{self.name}.{kind}"
        return LocalShard(
            name, local, shape, offset, self.replica_id, self.num_replicas, is_copy=self.is_copy
        )

    def whole_state(self, kind: str, local: torch.Tensor) -> LocalShard:
        """A state that all ranks of `split` have whole."""
        rank, num_ranks = (self.split.rank, self.split.num_ranks) if self.split else (0, 1)
        replica_id, num_replicas = self.replica_id * num_ranks + rank, self.num_replicas * num_ranks
        name, shape = f"optim.{self.name}.{kind}", tuple(local.shape)
        offset = (0,) * local.dim()
        return LocalShard(name, local, shape, offset, replica_id, num_replicas, is_copy=self.is_copy)


def clear_gradients(shards: Iterable[LocalShard]) -> None:
    """So that the next backward does not add to them."""
    for shard in shards:
        if shard.parameter is not None:
            shard.parameter.grad = None
