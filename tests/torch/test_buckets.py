"""Tensors worked on together: what may share a bucket, and the parts of a flat one."""

from __future__ import annotations

import pytest
import torch

from mlpipe.train.buckets import buckets, views

pytestmark = pytest.mark.torch


def test_a_bucket_is_of_one_dtype_and_device_and_keeps_its_limit():
    four, eight = torch.zeros(1), torch.zeros(2)
    elsewhere, other = torch.zeros(1, device="meta"), torch.zeros(1, dtype=torch.int32)
    tensors = [four, eight, four, elsewhere, four, other, torch.zeros(9), four]
    sizes = [len(bucket) for bucket in buckets(tensors, 12, lambda tensor: tensor)]
    assert sizes == [2, 1, 1, 1, 1, 1, 1]


def test_views_of_a_padded_flat_tensor_are_its_own_storage_in_the_shapes_of_the_tensors():
    tensors = [torch.empty(2, 3), torch.empty(0, 4), torch.empty(()), torch.empty(2)]
    flat = torch.arange(12.0)
    parts = views(flat, tensors)
    assert [part.shape for part in parts] == [tensor.shape for tensor in tensors]
    assert torch.cat([part.reshape(-1) for part in parts]).equal(flat[:9])
    parts[3].zero_()
    assert flat[7:9].tolist() == [0.0, 0.0]
