"""The order in which samples are seen: a function of the seed and the global sample index alone.

Epoch e is a pseudo-random permutation of the n samples keyed by (seed, e): a Feistel network over the
smallest even number of bits that holds n, walked along its cycle until the value is below n (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). No table, so memory does not grow with the corpus
and any position is reached at once, whatever the world size or batch was before.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
_MASK = (1 << 64) - 1


def order(seed: int, start: int, count: int, n: int) -> NDArray[np.int64]:
    """Sample indices (each below `n`) at the global positions start, ..., start + count - 1."""
    return order_at(seed, np.arange(start, start + count, dtype=np.int64), n)


def order_at(seed: int, positions: NDArray[np.int64], n: int) -> NDArray[np.int64]:
    """The same at any positions."""
    if n < 1:
        raise ValueError("there are no samples")
    epochs, within = np.divmod(positions, n)
    indices = np.empty(len(positions), dtype=np.int64)
    for epoch in distinct(epochs):
        chosen = epochs == epoch
        indices[chosen] = _permute(within[chosen].astype(np.uint64), n, seed, epoch)
    return indices


def distinct(values: NDArray[np.int64]) -> list[int]:
    """In ascending order. Without counts, np.unique would import numpy.ma: 20 ms of each rank's start."""
    found: list[int] = np.unique(values, return_counts=True)[0].tolist()
    return found


class Ordered:
    """A data set with an order of its own."""

    def order_at(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of its samples at the global `positions`, a function of the seed and these alone."""
        raise NotImplementedError


def samples_at(dataset: Any, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of a map-style set's samples at the global `positions`."""
    if isinstance(dataset, Ordered):
        return dataset.order_at(seed, positions)
    return order_at(seed, positions, len(dataset))


def _permute(values: NDArray[np.uint64], n: int, seed: int, epoch: int) -> NDArray[np.uint64]:
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    result = _feistel(values, half_bits, keys)
    while len(outside := np.flatnonzero(result >= n)):
        result[outside] = _feistel(result[outside], half_bits, keys)
    return result


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: tuple[int, ...]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
    return (left << shift) | right


@cache
def _round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    state = np.array([seed & _MASK, epoch & _MASK], dtype=np.uint64)
    mixed = _mix(state)
    base = int(_mix(mixed[:1] ^ (mixed[1:] << np.uint64(1)))[0])
    rounds = np.array([(base + i * 0x9E3779B97F4A7C15) & _MASK for i in range(_ROUNDS)], dtype=np.uint64)
    return tuple(int(key) for key in _mix(rounds))


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014), modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
