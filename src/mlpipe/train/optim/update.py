"""What the loop and the checkpoint know of an optimizer.

Learning rate and clipping are not its affair: each step is given the rate, and a factor for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from mlpipe.train.shards import LocalShard

Average = tuple[LocalShard, torch.Tensor]  # what is trained, and its average of the same shape
ISLANDS = "islands"  # in the scalars of an optimizer whose ranks have weights of their own
GROUPS = "groups_of_parameters"  # in the scalars of an optimizer with groups


class Update(Protocol):
    """Updates the shards that it was made with. May be made of another one, whose state and scalars it then
    hands on with its own."""

    def step(self, *, lr: float, scale: float) -> None:
        """One update by the shards' gradients, each multiplied by `scale` (in place)."""

    def state(self) -> list[LocalShard]:
        """All tensors that outlive a step, each named `optim.<parameter>.<state>` and with a global shape of
        its own: a checkpoint holds them, and loads them under any other mesh. As before the first step, if
        there was none yet. One named as a parameter is what a checkpoint has as the model's weight instead
        of that which is trained; such an Update makes this of its states in `after_load()`."""

    def scalars(self) -> dict[str, Any]:
        """What outlives a step besides, as JSON; the same on every rank of a pipeline's stage. A checkpoint
        has what the stages give in one: dicts joined, lists item by item, of all else the first stage's."""

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Takes what `scalars` gave when the checkpoint was written, before the tensors of `state` are
        filled from it."""


def averages_of(update: Update) -> list[Average]:
    """What a validation measures instead of the weights: the `averages()` of an Update that has any."""
    averages: list[Average] = getattr(update, "averages", list)()
    return averages


def after_load(update: Update) -> None:
    """To be called when the tensors of `state` have been filled from a checkpoint."""
    getattr(update, "after_load", list)()


def finish(update: Update) -> None:
    """To be called after the last step of a training."""
    getattr(update, "finish", list)()


def scaled_gradients(shards: Iterable[LocalShard], scale: float) -> list[tuple[LocalShard, torch.Tensor]]:
    """The shards that have a gradient, each with it, multiplied in place."""
    scaled = [(shard, gradient) for shard in shards if (gradient := shard.gradient()) is not None]
    if scaled:
        torch._foreach_mul_([gradient for _, gradient in scaled], scale)
    return scaled
