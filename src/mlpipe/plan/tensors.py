"""Tensors on one rank, by cause. What an axis of the mesh makes of them stands in `plan/axes/`, what an
allocator does in `plan/allocators/`. Standard library only."""

from collections.abc import Iterable
from operator import attrgetter
from typing import NamedTuple

WEIGHT_BYTES = 4  # fp32 whatever the precision, as are gradients and optimizer states
GRADIENT_BYTES = 4
COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # of what matmuls see


class Tensors(NamedTuple):
    """`number` tensors of one size, `num_bytes` all together."""

    num_bytes: int
    number: int

    def is_below(self, limit_bytes: int) -> bool:
        """Whether one of them has fewer bytes."""
        return self.num_bytes < limit_bytes * self.number


Group = tuple[Tensors, ...]

_bytes_of = attrgetter("num_bytes")


def total(group: Iterable[Tensors]) -> int:
    """Bytes."""
    return sum(map(_bytes_of, group))


def below(group: Iterable[Tensors], limit_bytes: int) -> int:
    """Bytes in tensors of fewer than `limit_bytes`."""
    return sum(tensors.num_bytes for tensors in group if tensors.is_below(limit_bytes))


class Moment(NamedTuple):
    """Bytes alive at a moment of the step besides weights and optimizer states; what a reduce-scatter and an
    all-gather have in hand then."""

    alive: int
    reduce_scattered: int = 0
    all_gathered: int = 0


class RankTensors(NamedTuple):
    """What one rank holds. `unsent`: gradients that stay whole until the last micro-batch sends them;
    `saved`: activations that autograd keeps for the backward pass. `rebuilt`: those that recomputation brings
    back, a block at a time. `copies`: of the weights, made and freed in every step, not all alive at once.
    `buffers`: bytes at the peak of these copies and of communication. `moments`: the fullest ones of a
    step. `waits`: of a gradient that waits for another one to be added to it."""

    parameters: Group
    gradients: Group
    unsent: Group
    optimizer: Group
    saved: Group
    rebuilt: Group
    copies: Group
    activation_bytes: int
    logit_bytes: int
    buffers: int
    moments: tuple[Moment, ...]
    waits: int = 0

    def keeping_gradients(self) -> "RankTensors":
        """Whose gradients live from the first step on, and do not come to life as the activations die; one
        that waits then does so beside them."""
        gradients = total(self.gradients)
        more = (gradients, gradients, self.waits)
        moments = zip(self.moments, more, strict=True)
        return self._replace(moments=tuple(one._replace(alive=one.alive + num) for one, num in moments))

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return total(self.parameters) + total(self.optimizer) + max(moment.alive for moment in self.moments)


class Reserved(NamedTuple):
    """What an allocator makes of them. `tensors`: with what the collectives' library adds. `context`: bytes
    that the process holds before the first tensor. `slack`: bytes that the allocator cannot use."""

    tensors: RankTensors
    context: int
    slack: int
