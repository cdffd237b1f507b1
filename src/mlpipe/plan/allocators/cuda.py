"""CUDA's caching allocator: memory comes in segments, which it keeps and cuts; what no tensor fits is
lost."""

from __future__ import annotations

from mlpipe.plan.tensors import RankTensors, Reserved

_CONTEXT_BYTES = 2**30  # kernels and cuBLAS workspaces
_NCCL_BYTES = 3 * 2**29  # its buffers, where there are others to talk to
_FRAGMENTATION_RATIO = 0.08  # of the tensors: what lies unused in segments

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}  # segments that grow leave fewer gaps


def reserve(tensors: RankTensors, world_size: int) -> Reserved:
    """Bytes reserved on the device."""
    context = _CONTEXT_BYTES + (_NCCL_BYTES if world_size > 1 else 0)
    return Reserved(tensors, context, int(_FRAGMENTATION_RATIO * tensors.peak))
