"""A schedule runs the microbatches of a step through a model: one file each.

It owns their order, when gradients travel between ranks, and that they add up. The loop, the memory probe and
the evaluation call it and know no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.model import Batch


class LossSum(NamedTuple):
    """What this rank adds to the world's sums: all zero where another rank of its tensor-parallel group or a
    later pipeline stage counts the same samples (see `World.holds_loss`).

    loss_sum, num_targets: fp64 scalars on the device, of the loss in nats and of the targets that it is the
    sum over. num_tokens: computed, with those that are padding or no target.
    """

    loss_sum: Tensor
    num_targets: Tensor
    num_tokens: int


class Schedule(Protocol):
    """Ranks may have different numbers of microbatches, and microbatches different numbers of samples. Where
    a pass needs all ranks, the data pad with microbatches that do not count (see `Microbatch`)."""

    def forward_backward(self, batches: Sequence[Microbatch]) -> LossSum:
        """All microbatches of a step; afterwards gradients are the mean over `World.num_gradient_ranks` of
        what each rank's loss sum gives."""
        ...

    def forward(
        self, batches: Iterable[Microbatch], after: Callable[[Microbatch, Batch], None] | None = None
    ) -> LossSum:
        """Without gradients, as many microbatches as come. `after`: called behind each, before the next one,
        with its batch as the model got it; where the loss is another rank's, maybe not."""
        ...

    def logits(self, inputs: Tensor) -> Tensor | None:
        """Of token ids (B, T), in evaluation mode; None on ranks that do not hold the loss."""
        ...
