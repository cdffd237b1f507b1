"""Averages of the weights that an Update keeps: a validation measures them instead of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mlpipe.train.optim.update import Average
from mlpipe.train.parallel.parallelized_model import ParallelizedModel


@contextmanager
def swapped_in(averages: Sequence[Average], model: ParallelizedModel) -> Iterator[None]:
    """The model computes with the averages while this is entered, by all ranks. Nothing may be reading the
    weights: a save has been staged (`Checkpointer.wait_for_staging`)."""
    _swap(averages, model)
    try:
        yield
    finally:
        _swap(averages, model)


@torch.no_grad()
def _swap(averages: Sequence[Average], model: ParallelizedModel) -> None:
    for shard, average in averages:
        weight = shard.local.clone()
        shard.local.copy_(average)
        average.copy_(weight)
    model.after_step()
    for module in model.built.module.modules():
        if hasattr(module, "reshard"):  # FSDP's, which may hold gathered weights of before
            module.reshard()
