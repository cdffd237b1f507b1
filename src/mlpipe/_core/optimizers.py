"""The optimizers that a pipeline can name: their arguments, the function that makes them, and what they cost.

This table lies in the lowest layer because three layers follow it: `spec` accepts names and arguments by it,
`plan` counts bytes by it and `train` builds by it. A new optimizer is one file in `train/optim/` and one
entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """A flag, a number or several numbers, as `default` is. The bounds hold for each of the numbers."""

    default: bool | float | tuple[float, ...]
    about: str
    above: float | None = None
    at_least: float | None = None
    below: float | None = None


@dataclass(frozen=True)
class Optimizer:
    """`build`: `package.module:function`; called with the shards that a rank updates and the arguments, it
    returns an `Update` (`train/optim/update.py`). `state_bytes_per_parameter`: what it keeps between steps
    for each fp32 parameter, by the arguments."""

    title: str
    about: str
    build: str
    arguments: Mapping[str, Argument]
    state_bytes_per_parameter: Callable[[Mapping[str, Any]], int]


OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        "AdamW",
        "AdamW (Loshchilov and Hutter, 2019) and its learning-rate schedule. Matrices decay, vectors (norms, "
        "biases) do not.",
        "mlpipe.train.optim.adamw:AdamW",
        {
            "betas": Argument((0.9, 0.95), "Decay of the first and second moment.", at_least=0, below=1),
            "eps": Argument(1e-8, "Added to the denominator.", above=0),
            "weight_decay": Argument(0.1, "Decoupled weight decay.", at_least=0),
        },
        lambda args: 8,  # the two moments
    ),
    "sgd": Optimizer(
        "SGD",
        "Stochastic gradient descent (torch.optim.SGD) and its learning-rate schedule. Matrices decay, "
        "vectors do not. Its first step takes 3 CPU seconds longer than AdamW's, for imports.",
        "mlpipe.train.optim.sgd:sgd",
        {
            "momentum": Argument(0.9, "Decay of the sum of gradients.", at_least=0, below=1),
            "weight_decay": Argument(0.0, "Added to the gradient, times the weight.", at_least=0),
        },
        lambda args: 4 if args["momentum"] else 0,  # the sum
    ),
}
DEFAULT = "adamw"
