"""Several data sets as one, each with its share of the samples, in an order that is a function of the seed
and the global sample index alone.

Shares are whole numbers. Of each block of as many positions as they add up to, every source has exactly its
share, spread over the block as evenly as can be. Then the positions are mixed, a block of them at a time, but
no more than 1,024, by a permutation keyed by the seed and their number (order.py): a source goes through its
own samples in its own order, epoch by epoch, whatever the lengths of the others, and each at most so many
positions early or late.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlpipe.train.data.order import Ordered, order, order_at, samples_at

_FINEST = 1_000_000  # of a weight's digits after the point, as a denominator
_MOST = 2**31  # that the shares add up to: its square is an int64
_MIXED = 1_024  # positions
_APART = 0x9E3779B97F4A7C15  # between the seeds of the sources


class Mixture(Ordered):
    """Indexed as if the sources lay one behind the other; which index is read when says `order_at`."""

    def __init__(self, sources: Sequence[Any], weights: Sequence[float]) -> None:
        self.sources = sources
        self.shares = np.array(shares(weights), dtype=np.int64)
        self._offsets = np.cumsum([0, *map(len, sources)])

    def __len__(self) -> int:
        return int(self._offsets[-1])

    def __getitem__(self, index: int) -> Any:
        source, own = self.place_of(index)
        return self.sources[source][own]

    @property
    def starts(self) -> list[int]:
        """Indices of the sources' first samples."""
        return self._offsets[:-1].tolist()

    def place_of(self, index: int) -> tuple[int, int]:
        """The source, and the number of the sample there."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source = int(np.searchsorted(self._offsets, index, side="right")) - 1
        return source, index - int(self._offsets[source])

    def order_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices at these global positions."""
        chosen, own = self._sources_at(seed, positions)
        indices = np.empty(len(positions), dtype=np.int64)
        for number, source in enumerate(self.sources):
            mine = chosen == number
            if mine.any():
                within = samples_at(source, seed + (number + 1) * _APART, own[mine])
                indices[mine] = self._offsets[number] + within
        return indices

    def _sources_at(
        self, seed: int, positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers of the sources at these global positions, and the position within each source's own. Each
        source takes, of the slots that those before it have left, every (left / share)th."""
        total = int(self.shares.sum())
        size = min(total, _MIXED)
        mixed = positions // size * size + order_at(seed, positions, size)
        blocks, left = np.divmod(mixed, total)
        chosen, own = np.full(len(positions), -1), np.empty_like(left)
        for number, share in enumerate(self.shares.tolist()):
            before = left * share // total
            here = (chosen < 0) & ((left + 1) * share // total > before)
            chosen[here], own[here] = number, (blocks * share + before)[here]
            left, total = left - before, total - share
        return chosen, own


class Shortened:
    """A mixture once through, for validation: as much of each source, from its beginning, as its share allows
    until the first one ends, and in an order of which every beginning is a mixture, too."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        lengths = [len(source) for source in mixture.sources]
        most = min(Fraction(n, int(share)) for n, share in zip(lengths, mixture.shares, strict=True))
        self._lengths = [max(1, int(most * int(share))) for share in mixture.shares]

    def __len__(self) -> int:
        return sum(self._lengths)

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        own = int(order(0, index, 1, len(self))[0])
        for source, length in zip(self.mixture.sources, self._lengths, strict=True):
            if own < length:
                return source[own]
            own -= length
        raise AssertionError("the lengths add up")


def shares(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the same ratio, to six digits after the point; where they would add up to
    more than 2**31, to so many parts."""
    exact = [Fraction(repr(weight)).limit_denominator(_FINEST) for weight in weights]
    whole = [int(one * lcm(*(each.denominator for each in exact))) for one in exact]
    least = [one // gcd(*whole) for one in whole]
    if sum(least) <= _MOST:
        return least
    return [max(1, one * _MOST // sum(least)) for one in least]
