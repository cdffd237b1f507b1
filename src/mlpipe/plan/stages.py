"""How many blocks of a model lie in each stage of its pipeline, or which children of a user's own.
Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from mlpipe.plan.shapes.shape import ModelShape

_TRAINING = 3  # passes over a matrix: forward, and twice in the backward pass


def split_blocks(
    num_blocks: int, num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """By stage, such that the longest stage is as short as can be. `first` and `last`: what the first stage
    has besides (the embedding), and the last one (norm, head, loss), in FLOPs or seconds of a block. Raises
    ValueError for fewer blocks than stages."""
    if num_blocks < num_stages:
        raise ValueError(f"{num_blocks} blocks make no {num_stages} stages")
    counts = [1] * num_stages
    besides = [0.0] * num_stages
    besides[0] += first
    besides[-1] += last
    for _ in range(num_blocks - num_stages):
        # Blocks are alike, so to add each where it hurts least is optimal. Of equal stages the later one
        # takes it: earlier ones hold more microbatches.
        shortest = min(range(num_stages), key=lambda stage: (counts[stage] + besides[stage], -stage))
        counts[shortest] += 1
    return tuple(counts)


def num_blocks_of(shape: ModelShape, seq_len: int, num_stages: int) -> tuple[int, ...]:
    """By stage, by the FLOPs of blocks and head; to look up an embedding takes none."""
    num_blocks, widths = shape.parameters.num_blocks, shape.widths
    head = 2 * _TRAINING * widths.get("dim", 0) * widths.get("vocab_size", 0)
    return _split(num_blocks, num_stages, (shape.flops_per_token(seq_len) - head) / num_blocks, float(head))


@lru_cache(maxsize=256)  # asked for by every candidate
def _split(num_blocks: int, num_stages: int, block: float, head: float) -> tuple[int, ...]:
    return split_blocks(num_blocks, num_stages, last=head / block)


def even_cut(flops: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Of children that take so much, one after the other, those with which stages begin but for the first,
    such that the longest stage is as short as can be. Of equal ones the later stages have more: earlier ones
    hold more microbatches. Raises ValueError for fewer children than stages."""
    if len(flops) < num_stages:
        raise ValueError(f"{len(flops)} children make no {num_stages} stages")
    before = [0.0, *accumulate(flops)]
    # of the first so many children: the longest stage, and where the stages begin
    best: list[tuple[float, tuple[int, ...]]] = [(longest, ()) for longest in before]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (max(best[begin][0], before[end] - before[begin]), (*best[begin][1], begin))
                    for begin in range(stage, end)
                ),
                default=(float("inf"), ()),
            )
            for end in range(len(before))
        ]
    return best[-1][1]
