"""CRC32C agrees with itself however the bytes are cut, and with the published check value."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe.store.checksum import BlockSums, combine, crc32c

pytestmark = pytest.mark.unit


def test_check_value():
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720, and every CRC catalogue


@pytest.mark.parametrize("size", [0, 1, 2**20 - 1, 2**20, 3 * 2**20 + 17])
def test_every_kind_of_buffer_gives_the_same_sum(size):
    data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    expected = crc32c(data[size // 2 :], crc32c(data[: size // 2]))
    assert crc32c(data) == crc32c(bytearray(data)) == crc32c(memoryview(data)) == expected
    if size:
        with mmap.mmap(-1, size) as shared:
            shared[:] = data
            view = memoryview(shared)
            assert crc32c(view) == expected
            view.release()  # raises if the sum kept a hold on the memory


@given(
    chunks=st.lists(st.binary(max_size=40), max_size=8),
    block_bytes=st.integers(1, 17),
)
@settings(deadline=None)
def test_block_sums_do_not_depend_on_the_chunks_and_combine_to_the_whole(chunks, block_bytes):
    whole = b"".join(chunks)
    sums = BlockSums(block_bytes)
    assert b"".join(sums.watch(chunks)) == whole
    assert sums.size_bytes == len(whole)
    assert sums.sums == [crc32c(whole[i : i + block_bytes]) for i in range(0, len(whole), block_bytes)]
    assert combine(sums.sums, len(whole), block_bytes) == crc32c(whole)
