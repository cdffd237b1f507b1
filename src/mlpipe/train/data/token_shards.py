"""Tokens in many files, of which only a few are on this machine's disk (see windows.py)."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from mlpipe._core.errors import TrainError
from mlpipe.train.data.order import distinct
from mlpipe.train.data.shard_cache import CachedFile, ShardCache, check_room
from mlpipe.train.data.tokens import DTYPES, Split, TokenDataset, TokenFolder
from mlpipe.train.data.windows import WINDOW, Windowed


class ShardedTokens(TokenDataset, Windowed):
    """As a folder of one file, but in another order. No sample lies across two files."""

    def __init__(self, tokens: TokenFolder, split: Split, seq_len: int, limit_bytes: int) -> None:
        Windowed.__init__(self, [max(0, (one.num_tokens - 1) // seq_len) for one in split.shards])
        self.seq_len = seq_len
        self.vocab_size = tokens.vocab_size
        self.dtype = np.dtype(DTYPES[tokens.dtype])
        self.files = [
            CachedFile(shard.file, shard.num_tokens * self.dtype.itemsize, shard.sha256)
            for shard in split.shards
        ]
        self._window = np.arange(seq_len + 1, dtype=np.int64)
        if self.num_samples < 1:
            raise TrainError(
                f"no file has one sample of {seq_len} + 1 tokens",
                where=tokens.where,
                hint="use a shorter seq_len or larger shards",
                kind="input",
            )
        smaller = "smaller files: mlpipe-corpus --shard"
        check_room(self.files, WINDOW, limit_bytes, where=tokens.where, smaller=smaller)
        self.cache = ShardCache(tokens.url or "", tokens.path / "shards", limit_bytes)
        self._maps: OrderedDict[int, NDArray[np.generic]] = OrderedDict()

    def windows(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """As of one file."""
        shards = np.searchsorted(self._offsets, indices, side="right") - 1
        tokens = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for shard in distinct(shards):
            rows = np.flatnonzero(shards == shard)
            starts = (indices[rows] - self._offsets[shard]) * self.seq_len
            tokens[rows] = self._mapped(shard)[starts[:, None] + self._window]
        return tokens

    def expect(self, pieces: list[int]) -> None:
        """Fetches them meanwhile."""
        self.cache.expect([self.files[shard] for shard in pieces])

    def _mapped(self, shard: int) -> NDArray[np.generic]:
        if shard in self._maps:
            self._maps.move_to_end(shard)
        else:
            self._maps[shard] = self._map(self.files[shard])
            while len(self._maps) > 2 * WINDOW:
                self._maps.popitem(last=False)
        return self._maps[shard]

    def _map(self, file: CachedFile) -> NDArray[np.generic]:
        return self.cache.opened(file, lambda path: np.memmap(path, dtype=self.dtype, mode="r"))
