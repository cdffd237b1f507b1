"""The optimizer that a plan names, of the table or a user's own; with groups of parameters and an average of
the weights where the plan asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from mlpipe._core.errors import TrainError
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.entry import Entry
from mlpipe.plan.updates import EmaPlan, OptimizerPlan
from mlpipe.train.optim.update import Update
from mlpipe.train.shards import LocalShard


def make_update(
    plan: OptimizerPlan,
    shards: Iterable[LocalShard],
    ema: EmaPlan | None = None,
    everywhere: Mapping[str, bool] | None = None,
    on_host: bool = False,
) -> Update:
    """The plan's optimizer over those of `shards` that are trained, with an average of them if there is an
    `ema`. `everywhere`: names of all that is trained, and whether it is in a block, where other ranks have
    other parameters. `on_host`: whether its states are there, and the update. Raises TrainError (input) where
    a user's own does not keep the rules."""
    trained = [shard for shard in shards if shard.is_trained]
    needs_blocks = plan.name is not None and OPTIMIZERS[plan.name].needs_blocks
    if everywhere is None:
        everywhere = {shard.name: shard.in_block for shard in trained}
    if needs_blocks and not any(everywhere.values()):
        raise TrainError(
            f"{plan.name} updates the matrices of the model's blocks, and no trained parameter is in a block",
            where="train.optimizer",
            hint="name the modules that are blocks in `model.blocks`, or take another optimizer",
            kind="input",
        )
    if plan.name is not None and (uncut := OPTIMIZERS[plan.name].uncut):
        cuts = ((shard.name, cut.axis) for shard in trained for cut in shard.slices if cut.axis in uncut)
        if (found := next(cuts, None)) is not None:
            raise TrainError(
                f"{plan.name} needs whole matrices, and {found[0]} is split over {found[1]}",
                where="train.optimizer",
                hint="take adamw, adamw8bit, lion or sgd, or a mesh without that axis",
                kind="input",
            )

    def build(some: Sequence[LocalShard], args: dict[str, Any]) -> Update:
        return _built(plan, some, {**plan.args, **args})

    def whole(some: Sequence[LocalShard]) -> Update:
        if not plan.groups:
            return build(some, {})
        from mlpipe.train.optim.grouped import Grouped

        return Grouped(plan.groups, some, build, everywhere)

    if on_host:
        from mlpipe.train.optim.on_host import OnHost

        update: Update = OnHost(trained, whole)
    else:
        update = whole(trained)
    if ema is None:
        return update
    from mlpipe.train.optim.ema import Ema

    return Ema(ema, update, trained)


def _built(plan: OptimizerPlan, shards: Sequence[LocalShard], args: dict[str, Any]) -> Update:
    if plan.name is None:
        from mlpipe.train.optim.own import own_update

        return own_update(Entry(plan.entry or "", args), shards)
    module, _, function = OPTIMIZERS[plan.name].build.partition(":")
    build: Callable[..., Update] = getattr(import_module(module), function)
    return build(shards, **args)
