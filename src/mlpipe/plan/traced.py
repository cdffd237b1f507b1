"""A user's own model in numbers, as `train/trace.py` reads them off it without running it: what
`plan/memory.py` and `plan/time.py` know of a preset by formula."""

from __future__ import annotations

from dataclasses import dataclass

from mlpipe.plan.memory import Counts


@dataclass(frozen=True)
class Ops:
    """Of one sample, in one direction. `other_bytes`: read and written by what is no matmul."""

    matmul_flops: float
    num_matmuls: int
    attention_flops: float  # a causal one's lower half
    other_bytes: float
    num_kernels: int


@dataclass(frozen=True)
class TracedPass:
    """Under one precision and activation checkpointing. `sample_bytes`: alive at most in forward and backward
    for each sample, without parameters and gradients. `backward`: with what is computed again."""

    sample_bytes: int
    forward: Ops
    backward: Ops


@dataclass(frozen=True)
class Traced:
    """`counts`: its `block` is the largest. `passes`: by precision and checkpointing, like `bf16 full`.
    `words`: what traced it."""

    counts: Counts
    num_blocks: int
    num_flops_per_token: float
    passes: dict[str, TracedPass]
    words: str

    def one(self, precision: str, checkpointing: str) -> TracedPass:
        return self.passes[f"{precision} {checkpointing}"]
