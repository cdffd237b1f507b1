"""Map-style sets of samples of different lengths, which are known before a sample is read."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.train.loss import IGNORED

ROUND = 64  # tokens: batches of few different shapes


class UnevenSamples:
    """Sample `i` has `lengths[i]` tokens, at most `seq_len`."""

    lengths: NDArray[np.int64]
    seq_len: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """As long as it is."""
        inputs, targets = self.sample(index)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def sample(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Inputs, and as targets the token behind each, or -100 where that is not learnt."""
        raise NotImplementedError

    def padded(self, indices: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """A batch with a sample a row, as long as the longest of them rounded up."""
        longest = int(self.lengths[indices].max())
        width = min(self.seq_len, -(-longest // ROUND) * ROUND)
        inputs = np.zeros((len(indices), width), np.int64)
        targets = np.full((len(indices), width), IGNORED, np.int64)
        for row, index in enumerate(indices.tolist()):
            length = int(self.lengths[index])
            inputs[row, :length], targets[row, :length] = self.sample(index)
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    @property
    def length_counts(self) -> dict[str, int]:
        """How many samples have up to 16, 32, ... tokens, and more than the bound before."""
        bounds = [16 << i for i in range(max(1, int(self.lengths.max() - 1).bit_length() - 3))]
        counts = np.bincount(np.searchsorted(bounds, self.lengths), minlength=len(bounds))
        return {str(bound): int(count) for bound, count in zip(bounds, counts, strict=True) if count}


def check_alike(digest: str, where: str, this: str, hint: str) -> None:
    """On all ranks: who deals samples by other lengths, or reads others, would wait for what never comes.
    `digest`: hexadecimal, of what must be alike; `this`: what this rank has, in words."""
    if not dist.is_initialized():
        return
    own = int(digest[:15], 16)
    bounds = torch.tensor([own, -own])
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
    if bounds.tolist() != [own, -own]:
        raise TrainError(
            f"the workers do not read the same: this one has {this}, another one has not",
            where=where,
            hint=hint,
            kind="input",
        )
