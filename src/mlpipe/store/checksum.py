"""CRC32C (Castagnoli): at memory speed, over any buffer without a copy, per block, and put together.

google-crc32c takes only buffers that need no release (bytes, ctypes arrays): a ctypes window over the
caller's memory is free, a copy would halve the speed. It holds the GIL, so pieces are small.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import google_crc32c

from mlpipe.store.base import Buffer

BLOCK_BYTES = 16 * 2**20
_PIECE_BYTES = 2**20
_Window = ctypes.c_char * _PIECE_BYTES
_POLYNOMIAL = 0x82F63B78


def crc32c(data: Buffer, value: int = 0) -> int:
    """CRC32C of `data`, continued from `value`."""
    if isinstance(data, bytes) and len(data) <= _PIECE_BYTES:
        return int(google_crc32c.extend(value, data))
    view = memoryview(data).cast("B")
    whole = 0
    if not view.readonly:
        whole = len(view) - len(view) % _PIECE_BYTES
        for start in range(0, whole, _PIECE_BYTES):
            value = google_crc32c.extend(value, _Window.from_buffer(view, start))
    for start in range(whole, len(view), _PIECE_BYTES):
        value = google_crc32c.extend(value, bytes(view[start : start + _PIECE_BYTES]))
    return int(value)


class BlockSums:
    """CRC32C of every `block_bytes` of a stream, the last block shorter."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self.size_bytes = 0
        self._sums: list[int] = []

    def watch(self, chunks: Iterable[Buffer]) -> Iterator[memoryview]:
        """The same bytes again in pieces of at most 1 MiB, each summed just before it is handed on, while
        it is in the processor's cache."""
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            start = 0
            while start < len(view):
                room = self.block_bytes - self.size_bytes % self.block_bytes
                piece = view[start : start + min(room, _PIECE_BYTES)]
                if room == self.block_bytes:
                    self._sums.append(0)
                self._sums[-1] = crc32c(piece, self._sums[-1])
                self.size_bytes += len(piece)
                start += len(piece)
                yield piece

    @property
    def sums(self) -> list[int]:
        """CRC32C of each block that was seen so far, the last one as far as it has come."""
        return list(self._sums)


def combine(sums: Sequence[int], size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """CRC32C of a whole of `size_bytes` from the sums of its blocks, without its bytes."""
    value = 0
    for index, block in enumerate(sums):
        length = min(block_bytes, size_bytes - index * block_bytes)
        value = _apply(_zeros_operator(length), value) ^ block
    return value


def _apply(matrix: Sequence[int], vector: int) -> int:
    """Matrix times vector over GF(2); the matrix as 32 columns."""
    result = 0
    for column in matrix:
        if vector & 1:
            result ^= column
        vector >>= 1
        if not vector:
            break
    return result


@cache
def _zeros_operator(num_bytes: int) -> tuple[int, ...]:
    """What appending `num_bytes` zero bytes does to a CRC (zlib's crc32_combine)."""
    power = (_POLYNOMIAL, *(1 << bit for bit in range(31)))  # one zero bit
    result = tuple(1 << bit for bit in range(32))
    num_bits = 8 * num_bytes
    while num_bits:
        if num_bits & 1:
            result = tuple(_apply(power, column) for column in result)
        power = tuple(_apply(power, column) for column in power)
        num_bits >>= 1
    return result
