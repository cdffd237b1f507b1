"""What the loop and the checkpoint know of an optimizer.

Learning rate and clipping are not its affair: each step is given the rate, and a factor for the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Protocol

import torch

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.plan import Entry, OptimizerPlan
from mlpipe.train.shards import LocalShard


class Update(Protocol):
    """Updates the shards that it was made with. May be made of another one, whose state and scalars it then
    hands on with its own."""

    def step(self, *, lr: float, scale: float) -> None:
        """One update by the shards' gradients, each multiplied by `scale` (in place)."""

    def state(self) -> list[LocalShard]:
        """All tensors that outlive a step, each named `optim.<parameter>.<state>` and with a global shape of
        its own: a checkpoint holds them, and loads them under any other mesh. As before the first step, if
        there was none yet."""

    def scalars(self) -> dict[str, Any]:
        """What outlives a step besides, as JSON; the same on every rank."""

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """Takes what `scalars` gave when the checkpoint was written, before the tensors of `state` are
        filled from it."""


def make_update(plan: OptimizerPlan, shards: Iterable[LocalShard]) -> Update:
    """The plan's optimizer over those of `shards` that are trained. Raises TrainError (input) where a user's
    own does not keep the rules."""
    trained = [shard for shard in shards if shard.parameter is not None and shard.parameter.requires_grad]
    if plan.name is None:
        from mlpipe.train.optim.own import own_update

        return own_update(Entry(plan.entry or "", plan.args), trained)
    module, _, function = OPTIMIZERS[plan.name].build.partition(":")
    build: Callable[..., Update] = getattr(import_module(module), function)
    return build(trained, **plan.args)


def scaled_gradients(shards: Iterable[LocalShard], scale: float) -> list[tuple[LocalShard, torch.Tensor]]:
    """The shards that have a gradient, each with it, multiplied in place."""
    found = [(shard, gradient) for shard in shards if (gradient := shard.gradient()) is not None]
    if found:
        torch._foreach_mul_([gradient for _, gradient in found], scale)
    return found
