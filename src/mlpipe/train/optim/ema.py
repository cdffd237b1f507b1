"""An exponential moving average of the weights (Polyak and Juditsky, 1992, with the weights of Tarvainen and
Valpola, Mean Teacher, 2017), beside any optimizer: each rank averages what it updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from mlpipe._core.errors import TrainError
from mlpipe.plan.updates import EmaPlan
from mlpipe.store.manifest import Manifest
from mlpipe.train.optim.update import Average, Update, after_load
from mlpipe.train.shards import LocalShard

KIND = "ema"  # of state, in the names of a checkpoint's tensors


class Ema:
    """`update`: of the `shards` that are trained, whose averages begin as they are."""

    def __init__(self, plan: EmaPlan, update: Update, shards: Sequence[LocalShard]) -> None:
        self.plan = plan
        self.update = update
        self.shards = shards
        self.num_steps = 0
        self._averages = [shard.local.detach().clone() for shard in shards]

    @torch.no_grad()
    def step(self, *, lr: float, scale: float) -> None:
        """One update; after each `every`-th the averages move towards the weights."""
        self.update.step(lr=lr, scale=scale)
        self.num_steps += 1
        if self.num_steps % self.plan.every == 0 and self.shards:
            weights = [shard.local for shard in self.shards]
            torch._foreach_lerp_(self._averages, weights, 1 - self.plan.decay)

    def averages(self) -> list[Average]:
        """Of each parameter."""
        return list(zip(self.shards, self._averages, strict=True))

    def after_load(self) -> None:
        """The optimizer's own."""
        after_load(self.update)

    def state(self) -> list[LocalShard]:
        """The optimizer's own, and the averages."""
        own = (shard.state(KIND, average) for shard, average in self.averages())
        return [*self.update.state(), *own]

    def scalars(self) -> dict[str, Any]:
        """The optimizer's own, and the number of steps."""
        return {**self.update.scalars(), "ema": {"num_steps": self.num_steps}}

    def load_scalars(self, scalars: dict[str, Any]) -> None:
        """As `scalars` gave them. Raises TrainError (input) where no average was kept."""
        if "ema" not in scalars:
            raise TrainError(
                "the checkpoint has no average of the weights to go on with",
                hint="remove `ema`, or start a new run",
                kind="input",
            )
        self.num_steps = scalars["ema"]["num_steps"]
        self.update.load_scalars(scalars)


def averaged(shards: Sequence[LocalShard], manifest: Manifest, where: str) -> list[LocalShard]:
    """The same tensors, to be filled with the checkpoint's averages; what it keeps none of (buffers, frozen
    parameters) as it is. Raises TrainError (input) where there is none."""
    names = {shard.name: f"optim.{shard.name}.{KIND}" for shard in shards}
    kept = [
        replace(shard, name=names[shard.name]) if names[shard.name] in manifest["tensors"] else shard
        for shard in shards
    ]
    if kept == list(shards):
        raise TrainError(
            "the checkpoint has no average of the weights",
            where=where,
            hint="it is kept where the training says `ema: {decay: 0.999}`",
            kind="input",
        )
    return kept
