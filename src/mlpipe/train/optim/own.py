"""An optimizer of the user's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from mlpipe.plan.entry import Entry
from mlpipe.train.contract import broken
from mlpipe.train.model import load_entry
from mlpipe.train.optim.torch_optimizer import TorchOptimizer
from mlpipe.train.shards import LocalShard


def own_update(entry: Entry, shards: Sequence[LocalShard]) -> TorchOptimizer:
    """Of the function or class behind `entry`, called with a list of parameters and its `args`. Raises
    TrainError (input) that names what it does not keep of the contract."""
    function = load_entry(entry)

    def build(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        try:
            optimizer = function(parameters, **entry.args)
        except Exception as error:
            raise broken(
                entry.entry,
                f"failed to build the optimizer: {type(error).__name__}: {error}",
                "take a list of parameters and the `args`, as the classes of torch.optim do",
            ) from error
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise broken(
                entry.entry,
                f"returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
                "return one, or name a class of them",
            )
        theirs = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not theirs <= set(map(id, parameters)):
            raise broken(
                entry.entry,
                "updates other tensors than the parameters that it was given",
                "give the optimizer these, in one group or several",
            )
        return optimizer

    return TorchOptimizer(shards, build, entry.entry)
