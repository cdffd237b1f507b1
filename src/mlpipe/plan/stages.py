"""How many blocks of a model lie in each stage of its pipeline. Standard library only."""

from __future__ import annotations


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
