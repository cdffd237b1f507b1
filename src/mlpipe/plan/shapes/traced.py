"""A user's own model in numbers, as `train/trace.py` reads them off it without running it: what
`shapes/dense.py` knows of a preset by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from mlpipe.plan.kernels import CACHED_BYTES, Kernels
from mlpipe.plan.shapes.shape import Activations, ParameterCounts, PassSeconds, StepShape
from mlpipe.plan.tensors import Tensors


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
    for each sample, without parameters and gradients; `kept_bytes`: between the two. `backward`: with what is
    computed again. `put_off_bytes`: after a backward pass that puts off the gradients of weights."""

    sample_bytes: int
    kept_bytes: int
    forward: Ops
    backward: Ops
    put_off_bytes: int = 0


@dataclass(frozen=True)
class Child:
    """Of a sequence that a pipeline is cut between: what computing it forward takes for a sample, and how
    many values of a token it gives to the next one."""

    name: str
    flops: float
    num_outputs: int


@dataclass(frozen=True)
class Traced:
    """`passes`: by precision and checkpointing, like `bf16 full`; `of_ranks`: those of each rank of a
    pipeline, whose stages begin with the first of `children` and with those of `cut`. `words`: what traced
    it."""

    parameters: ParameterCounts
    num_flops_per_token: float
    passes: dict[str, TracedPass]
    words: str
    of_ranks: tuple[dict[str, TracedPass], ...] = ()
    children: tuple[Child, ...] = ()
    cut: tuple[str, ...] = ()

    @property
    def widths(self) -> Mapping[str, int]:
        """How many values of a token go from stage to stage, at most."""
        ends = [one for one, after in pairwise(self.children) if after.name in self.cut]
        return {"stage_output": max(one.num_outputs for one in ends)} if ends else {}

    def one(self, precision: str, checkpointing: str, rank: int | None = None) -> TracedPass:
        """The pass under these settings."""
        passes = self.passes if rank is None else self.of_ranks[rank]
        width = "bf16" if precision == "fp16" else precision  # as wide, and traced once
        return passes[f"{width} {checkpointing}"]

    def flops_per_token(self, seq_len: int) -> float:
        """Counted at the length that was traced, which is the one that is planned."""
        return self.num_flops_per_token

    def activations(self, step: StepShape, device: str) -> Activations:
        """What is kept, in as many tensors as there are kernels, and what is besides at the peak."""
        traced = self.one(step.precision, step.checkpointing, step.part.rank)
        saved = Tensors(step.micro_batch * traced.kept_bytes, traced.forward.num_kernels)
        more = step.micro_batch * (traced.sample_bytes - traced.kept_bytes)
        put_off = step.micro_batch * traced.put_off_bytes
        return Activations((saved,), (), more, logit_bytes=0, made=(), put_off_bytes=put_off)

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """The work is spread evenly over the blocks."""
        traced = self.one(step.precision, step.checkpointing, step.part.rank)
        number = max(1, self.parameters.of(step.part).num_blocks)

        def seconds(ops: Ops) -> float:
            each = step.micro_batch * ops.matmul_flops / max(1, ops.num_matmuls)
            matmuls = ops.num_matmuls * kernels.matmul_flops(each) if each else 0.0
            other_bytes = step.micro_batch * ops.other_bytes
            others = kernels.stream(other_bytes, large=other_bytes > CACHED_BYTES * ops.num_kernels)
            attention = kernels.attention(step.micro_batch * ops.attention_flops, step.seq_len)
            return kernels.at_least(matmuls + attention + others, ops.num_kernels) / number

        return PassSeconds(seconds(traced.forward), seconds(traced.backward), 0.0, 0.0)
