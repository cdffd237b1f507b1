"""gloo's copies: a collective on CPU tensors works in memory of its own (torch, ProcessGroupGloo.cpp)."""

from __future__ import annotations

from mlpipe.plan.tensors import Moment, RankTensors


def with_clones(tensors: RankTensors) -> RankTensors:
    """A reduce-scatter clones its input and reduces the whole; an all-gather receives into one flat tensor.
    An all-reduce works in place."""
    clones = [moment.reduce_scattered + moment.all_gathered for moment in tensors.moments]
    moments = tuple(
        Moment(moment.alive + clone) for moment, clone in zip(tensors.moments, clones, strict=True)
    )
    return tensors._replace(buffers=tensors.buffers + max(clones), moments=moments)
