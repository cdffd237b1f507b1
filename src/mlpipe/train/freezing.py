"""Parameters that are not trained. A technique that splits or sends gradients must know before it is applied;
buffers, such as the statistics of a batch norm, go on."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe._core.patterns import frozen


def freeze(model: nn.Module, patterns: Sequence[str]) -> str:
    """In place, by the names of the model's own parameters, tied ones by each of theirs; what it came to, in
    words. Raises TrainError (input) for a pattern that fits nothing, and when nothing is left."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in frozen(patterns, parameters, TrainError):
        parameters[name].requires_grad_(False)
    own = list(model.parameters())
    total, trained = sum(one.numel() for one in own), sum(one.numel() for one in own if one.requires_grad)
    if not trained:
        raise TrainError(
            "all parameters are frozen, so nothing is trained",
            where="train.freeze",
            hint="leave some out",
            kind="input",
        )
    return f"{total - trained:,} of {total:,} parameters are frozen"
