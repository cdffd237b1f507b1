"""An order of samples that lie in pieces (files, row groups) of which only a few are at hand at a time.

A permutation of all samples would want every piece in each step. So an epoch goes through the pieces in a
random order, a few at a time (a window), and through the samples of a window in a random order: both are
permutations keyed by the seed, the epoch and the window (order.py), and so any position is still reached at
once. While one window is read, the next one's pieces can be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mlpipe.train.data.order import Ordered, distinct, order, order_at

WINDOW = 8  # pieces whose samples are mixed


class Windowed(Ordered):
    """`counts`: samples in each piece. Samples are numbered piece by piece."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.array(counts, np.int64)
        self._offsets = np.cumsum([0, *self.counts])
        self.num_samples = int(self._offsets[-1])
        self._expected = -1

    def __len__(self) -> int:
        return self.num_samples

    def expect(self, pieces: list[int]) -> None:
        """They will be read soon."""

    def where(self, index: int) -> str:
        """Of a sample, for messages: its file, of sets that know it."""
        return type(self).__name__

    def place_of(self, index: int) -> tuple[int, int]:
        """The piece in which a sample lies, and its number there."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        piece = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return piece, index - int(self._offsets[piece])

    def order_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample indices at these global positions."""
        epochs, within = np.divmod(positions, self.num_samples)
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in distinct(epochs):
            pieces, ends = self._windows_of(seed, epoch)
            numbers = np.searchsorted(ends, within, side="right")
            for number in distinct(numbers[epochs == epoch]):
                chosen = (epochs == epoch) & (numbers == number)
                begin, end = (int(ends[number - 1]) if number else 0), int(ends[number])
                unique = epoch * len(ends) + number
                local = order_at(~seed, unique * (end - begin) + within[chosen] - begin, end - begin)
                mine = pieces[number * WINDOW : (number + 1) * WINDOW]
                stops = np.cumsum(self.counts[mine])
                which = np.searchsorted(stops, local, side="right")
                indices[chosen] = self._offsets[mine[which]] + local - (stops - self.counts[mine])[which]
            self._expect(seed, epoch, int(numbers[epochs == epoch].max()), len(ends))
        return indices

    def _windows_of(self, seed: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The pieces in the order of that epoch, and the position at which each window ends."""
        return _windows(seed, epoch, tuple(self.counts.tolist()))

    def _expect(self, seed: int, epoch: int, number: int, num_windows: int) -> None:
        """The pieces of the window behind that one, once."""
        unique = epoch * num_windows + number
        if unique == self._expected:
            return
        self._expected = unique
        following, number = divmod(unique + 1, num_windows)
        pieces, _ = self._windows_of(seed, following)
        self.expect(pieces[number * WINDOW : (number + 1) * WINDOW].tolist())


@lru_cache(maxsize=4)
def _windows(seed: int, epoch: int, counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    pieces = order(seed, epoch * len(counts), len(counts), len(counts))
    ends = np.cumsum(np.array(counts, dtype=np.int64)[pieces])
    last = np.minimum(np.arange(WINDOW, len(counts) + WINDOW, WINDOW), len(counts)) - 1
    return pieces, ends[last]
