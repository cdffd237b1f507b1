"""Tensors that are worked on together, so many bytes at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

Item = TypeVar("Item")


def buckets(
    items: Iterable[Item], limit_bytes: int, tensor_of: Callable[[Item], Tensor]
) -> Iterator[list[Item]]:
    """Neighbours of one dtype on one device; of at most so many bytes, or one that is larger."""
    bucket: list[Item] = []
    size_bytes, kind = 0, None
    for item in items:
        tensor = tensor_of(item)
        is_unlike = kind != (tensor.dtype, tensor.device)
        if bucket and (is_unlike or size_bytes + tensor.nbytes > limit_bytes):
            yield bucket
            bucket, size_bytes = [], 0
        kind = tensor.dtype, tensor.device
        bucket.append(item)
        size_bytes += tensor.nbytes
    if bucket:
        yield bucket


def views(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Of a flat tensor that has `tensors` one behind the other, and perhaps padding, the part of each in its
    shape."""
    sizes = [tensor.numel() for tensor in tensors]
    parts = flat.split([*sizes, flat.numel() - sum(sizes)])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=False)]
