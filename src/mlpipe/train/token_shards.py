"""Tokens in many files, of which only a few are on this machine's disk.

A permutation of all samples would want every file in each step. So an epoch goes through the files in a
random order, a few at a time (a window), and through the samples of a window in a random order: both are
permutations keyed by the seed, the epoch and the window (order.py), and so any position is still reached at
once. While one window is read, the next one's files are fetched.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe._core.units import format_bytes
from mlpipe.train.order import Ordered, order, order_at
from mlpipe.train.shard_cache import CachedFile, ShardCache
from mlpipe.train.tokens import DTYPES, Split, TokenDataset, TokenFolder

WINDOW = 8  # files whose samples are mixed
_TRIES = 3


class ShardedTokens(TokenDataset, Ordered):
    """As a folder of one file, but in another order. No sample lies across two files."""

    def __init__(self, tokens: TokenFolder, split: Split, seq_len: int, limit_bytes: int) -> None:
        self.seq_len = seq_len
        self.vocab_size = tokens.vocab_size
        self.dtype = np.dtype(DTYPES[tokens.dtype])
        self.files = [
            CachedFile(shard.file, shard.num_tokens * self.dtype.itemsize, shard.sha256)
            for shard in split.shards
        ]
        self.counts = np.array([max(0, (one.num_tokens - 1) // seq_len) for one in split.shards], np.int64)
        self._offsets = np.cumsum([0, *self.counts])
        self._window = np.arange(seq_len + 1, dtype=np.int64)
        self.num_samples = int(self._offsets[-1])
        if self.num_samples < 1:
            raise TrainError(
                f"no file has one sample of {seq_len} + 1 tokens",
                where=tokens.where,
                hint="use a shorter seq_len or larger shards",
                kind="input",
            )
        needed = 2 * sum(sorted((file.size_bytes for file in self.files), reverse=True)[:WINDOW])
        if needed > limit_bytes:
            raise TrainError(
                f"two windows of {WINDOW} files are {format_bytes(needed)}, "
                f"the cache has {format_bytes(limit_bytes)}",
                where=tokens.where,
                hint="write a larger data.cache, or smaller files: mlpipe-corpus --shard",
                kind="input",
            )
        self.cache = ShardCache(tokens.url or "", tokens.path / "shards", limit_bytes)
        self._maps: OrderedDict[int, NDArray[np.generic]] = OrderedDict()
        self._expected = -1

    def order_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample indices at these global positions."""
        epochs, within = np.divmod(positions, self.num_samples)
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            shards, ends = self._windows_of(seed, epoch)
            numbers = np.searchsorted(ends, within, side="right")
            for number in np.unique(numbers[epochs == epoch]).tolist():
                chosen = (epochs == epoch) & (numbers == number)
                begin, end = (int(ends[number - 1]) if number else 0), int(ends[number])
                unique = epoch * len(ends) + number
                local = order_at(~seed, unique * (end - begin) + within[chosen] - begin, end - begin)
                mine = shards[number * WINDOW : (number + 1) * WINDOW]
                stops = np.cumsum(self.counts[mine])
                which = np.searchsorted(stops, local, side="right")
                indices[chosen] = self._offsets[mine[which]] + local - (stops - self.counts[mine])[which]
            self._expect(seed, epoch, int(numbers[epochs == epoch].max()), len(ends))
        return indices

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """As of one file."""
        shards = np.searchsorted(self._offsets, indices, side="right") - 1
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for shard in np.unique(shards).tolist():
            rows = np.flatnonzero(shards == shard)
            starts = (indices[rows] - self._offsets[shard]) * self.seq_len
            tokens[rows] = self._mapped(shard)[starts[:, None] + self._window]
        return tokens

    def _windows_of(self, seed: int, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The files in the order of that epoch, and the position at which each window ends."""
        return _windows(seed, epoch, tuple(self.counts.tolist()))

    def _expect(self, seed: int, epoch: int, number: int, num_windows: int) -> None:
        """The files of the window behind that one, once."""
        unique = epoch * num_windows + number
        if unique == self._expected:
            return
        self._expected = unique
        following, number = divmod(unique + 1, num_windows)
        shards, _ = self._windows_of(seed, following)
        self.cache.expect([self.files[shard] for shard in shards[number * WINDOW : (number + 1) * WINDOW]])

    def _mapped(self, shard: int) -> NDArray[np.generic]:
        if shard in self._maps:
            self._maps.move_to_end(shard)
        else:
            self._maps[shard] = self._map(self.files[shard])
            while len(self._maps) > 2 * WINDOW:
                self._maps.popitem(last=False)
        return self._maps[shard]

    def _map(self, file: CachedFile) -> NDArray[np.generic]:
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):  # another rank has just made room
                return np.memmap(self.cache.get(file), dtype=self.dtype, mode="r")
        return np.memmap(self.cache.get(file), dtype=self.dtype, mode="r")


@lru_cache(maxsize=4)
def _windows(seed: int, epoch: int, counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    shards = order(seed, epoch * len(counts), len(counts), len(counts))
    ends = np.cumsum(np.array(counts, dtype=np.int64)[shards])
    last = np.minimum(np.arange(WINDOW, len(counts) + WINDOW, WINDOW), len(counts)) - 1
    return shards, ends[last]
