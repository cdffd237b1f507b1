"""Tensors that are worked on together, so many bytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor

Item = TypeVar("Item")


def buckets(
    items: Iterable[Item], limit_bytes: int, tensor_of: Callable[[Item], Tensor]
) -> Iterator[list[Item]]:
    """Neighbours of one dtype; of at most so many bytes, or one that is larger."""
    bucket: list[Item] = []
    size_bytes = 0
    for item in items:
        tensor = tensor_of(item)
        is_full = size_bytes + tensor.nbytes > limit_bytes
        if bucket and (is_full or tensor.dtype != tensor_of(bucket[0]).dtype):
            yield bucket
            bucket, size_bytes = [], 0
        bucket.append(item)
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket
