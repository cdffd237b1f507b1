"""Tensors of which each rank has its own, such as what it has not yet told the others: in a checkpoint they
are the rows of one tensor. With another number of ranks each begins with the mean of the rows, which leaves
the mean over the ranks what it was."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from mlpipe.train.shards import LocalShard


@dataclass
class RankRows:
    """This is `rank` of `num_ranks`."""

    rank: int
    num_ranks: int
    _saved: int | None = None  # while a checkpoint is loaded: how many rows it has
    _loaded: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def begin_load(self, num_saved: int) -> None:
        """From now on `row` gives what is to be filled from a checkpoint with so many rows; 0: none."""
        self._saved, self._loaded = num_saved, []

    def after_load(self) -> None:
        """All of it was filled."""
        for tensor, rows in self._loaded:
            tensor.copy_(rows.mean(0))
        self._saved, self._loaded = None, []

    @property
    def is_loading_nothing(self) -> bool:
        """The checkpoint that is loaded has none of these."""
        return self._saved == 0

    def row(self, own: LocalShard, *, mean: bool = True) -> list[LocalShard]:
        """`own`, which other ranks have otherwise, as a checkpoint has it: nothing, where it has not. Where a
        mean has no sense (`mean` False) each of another number of ranks takes a row, in turn."""
        if self.is_loading_nothing:
            return []
        number = self.num_ranks if self._saved is None else self._saved
        shape = (number, *own.shape)
        if number == self.num_ranks:
            return [replace(own, local=own.local[None], shape=shape, offset=(self.rank, *own.offset))]
        if not mean:
            return [
                replace(own, local=own.local[None], shape=shape, offset=(self.rank % number, *own.offset))
            ]
        rows = own.local.new_empty((number, *own.local.shape))
        self._loaded.append((own.local, rows))
        return [replace(own, local=rows, shape=shape, offset=(0, *own.offset))]
