"""One microbatch after the other, each forward and backward; gradients travel in the last one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from mlpipe.train.data.microbatch import Microbatch, to_device
from mlpipe.train.model import Batch
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, nothing
from mlpipe.train.schedules import LossSum
from mlpipe.train.world import World


class Accumulate:
    """Gradient accumulation over the whole model. `before_microbatch` is called before each."""

    def __init__(
        self, model: ParallelizedModel, world: World, before_microbatch: Callable[[], None] = nothing
    ) -> None:
        self.model = model
        self.world = world
        self.before_microbatch = before_microbatch

    def forward_backward(self, batches: Sequence[Microbatch]) -> LossSum:
        """As the protocol says."""
        sums = Sums(self.world)
        self.model.before_passes()
        for number, microbatch in enumerate(batches, start=1):
            self.before_microbatch()
            self.model.before_forward(microbatch.counts)
            with self.model.gradient_sync(number == len(batches)):
                loss, num_targets = self.model.module(to_device(microbatch.batch, self.world.device))
                (loss if microbatch.counts else loss * 0).backward()
            sums.add(microbatch, loss.detach(), num_targets)
        self.model.after_backward()
        return sums.counted()

    @torch.no_grad()
    def forward(
        self, batches: Iterable[Microbatch], after: Callable[[Microbatch, Batch], None] | None = None
    ) -> LossSum:
        """As the protocol says."""
        sums = Sums(self.world)
        self.model.before_passes()
        for microbatch in batches:
            self.before_microbatch()
            batch = to_device(microbatch.batch, self.world.device)
            loss, num_targets = self.model.module(batch)
            sums.add(microbatch, loss, num_targets)
            if after is not None:
                after(microbatch, batch)
        return sums.counted()

    @torch.no_grad()
    def logits(self, inputs: Tensor) -> Tensor | None:
        """As the protocol says."""
        self.model.before_passes()
        logits: Tensor = self.model.module({"inputs": inputs})
        return logits


class Sums:
    """On the device: to read them, the host would have to wait."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.loss = torch.zeros((), dtype=torch.float64, device=world.device)
        self.num_targets = torch.zeros((), dtype=torch.float64, device=world.device)
        self.num_tokens = 0

    def add(self, microbatch: Microbatch, loss: Tensor, num_targets: Tensor) -> None:
        """Of a microbatch, where it counts and this rank counts it."""
        if microbatch.counts and self.world.holds_loss:
            self.loss += loss
            self.num_targets += num_targets
            self.num_tokens += microbatch.num_tokens

    def counted(self) -> LossSum:
        """Of all that were added."""
        return LossSum(self.loss, self.num_targets, self.num_tokens)
