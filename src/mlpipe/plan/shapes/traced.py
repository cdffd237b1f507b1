"""A user's own model in numbers, as `train/trace.py` reads them off it without running it: what
`shapes/dense.py` knows of a preset by formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
    for each sample, without parameters and gradients. `backward`: with what is computed again."""

    sample_bytes: int
    forward: Ops
    backward: Ops


@dataclass(frozen=True)
class Traced:
    """`passes`: by precision and checkpointing, like `bf16 full`. `words`: what traced it."""

    parameters: ParameterCounts
    num_flops_per_token: float
    passes: dict[str, TracedPass]
    words: str

    @property
    def widths(self) -> Mapping[str, int]:
        return {}

    def one(self, precision: str, checkpointing: str) -> TracedPass:
        """The pass under these settings."""
        return self.passes[f"{precision} {checkpointing}"]

    def flops_per_token(self, seq_len: int) -> float:
        """Counted at the length that was traced, which is the one that is planned."""
        return self.num_flops_per_token

    def activations(self, step: StepShape, device: str) -> Activations:
        """All that is alive at the peak, in as many tensors as there are kernels."""
        traced = self.one(step.precision, step.checkpointing)
        saved = Tensors(step.micro_batch * traced.sample_bytes, traced.forward.num_kernels)
        return Activations(saved=(saved,), rebuilt=(), backward_bytes=0, logit_bytes=0, made=())

    def pass_seconds(self, step: StepShape, kernels: Kernels) -> PassSeconds:
        """The work is spread evenly over the blocks."""
        traced, number = self.one(step.precision, step.checkpointing), max(1, self.parameters.num_blocks)

        def seconds(ops: Ops) -> float:
            each = step.micro_batch * ops.matmul_flops / max(1, ops.num_matmuls)
            matmuls = ops.num_matmuls * kernels.matmul_flops(each) if each else 0.0
            other_bytes = step.micro_batch * ops.other_bytes
            others = kernels.stream(other_bytes, large=other_bytes > CACHED_BYTES * ops.num_kernels)
            attention = kernels.attention(step.micro_batch * ops.attention_flops, step.seq_len)
            return kernels.at_least(matmuls + attention + others, ops.num_kernels) / number

        return PassSeconds(seconds(traced.forward), seconds(traced.backward), 0.0, 0.0)
