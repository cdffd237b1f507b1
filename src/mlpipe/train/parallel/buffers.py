"""Buffers, of which all ranks go by rank 0's: as DistributedDataParallel has it, sent before a step's first
forward pass, unless that reads none of them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

# In training they go by their batch, and only write their running averages.
_BATCH_NORMS = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm}


def reading(module: nn.Module) -> Callable[[], bool]:
    """Whether the next forward pass of `module` reads buffers. Rank 0's averages follow from its own batches
    alone; they are sent before a validation, and are those of a checkpoint."""
    owners = [one for one in module.modules() if any(True for _ in one.buffers(recurse=False))]
    if any(type(one) not in _BATCH_NORMS for one in owners):
        return lambda: True
    return lambda: not all(one.training for one in owners)
