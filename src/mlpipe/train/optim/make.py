"""The optimizer that a plan names: of the table, or a user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module

from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.plan import Entry, OptimizerPlan
from mlpipe.train.optim.update import Update
from mlpipe.train.shards import LocalShard


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
