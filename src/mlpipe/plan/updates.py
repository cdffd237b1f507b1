"""How gradients become new weights (`TrainPlan.optimizer`), and how copies of the weights agree on them."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from mlpipe.plan.entry import Entry


class ParameterGroup(NamedTuple):
    """Parameters whose names match the pattern, and are of no earlier group. `lr_scale`: times the learning
    rate. `weight_decay`: instead of the optimizer's, of vectors as well; None: as all others."""

    match: str
    lr_scale: float = 1.0
    weight_decay: float | None = None


class OptimizerPlan(NamedTuple):
    """`name`: of `_core/optimizers.py`; None: the user's own function, by `entry`. `args`: its arguments,
    whichever it is; learning rate and clipping are not among them. `state_bytes_per_parameter`: what it keeps
    between steps for each fp32 parameter. `own_schedule`: a function of the user's, of schedule `own`; called
    with the step, from 1, and the number of steps, it gives a factor of `lr`."""

    name: str | None
    entry: str | None
    args: dict[str, Any]
    state_bytes_per_parameter: int
    lr: float
    grad_clip: float  # global L2 norm; 0 switches clipping off
    schedule: Literal["constant", "cosine", "linear", "wsd", "polynomial", "own"]
    warmup_steps: int
    decay_steps: int  # of wsd: length of the final decay
    min_lr_ratio: float
    power: float | None = None  # of polynomial; None: 1
    own_schedule: Entry | None = None
    clip_value: float | None = None  # of each value of the gradient; None: no limit
    groups: tuple[ParameterGroup, ...] = ()


class EmaPlan(NamedTuple):
    """Exponential moving average of the weights: after each `every` steps `average = decay * average +
    (1 - decay) * weight`."""

    decay: float
    every: int = 1


class CompressPlan(NamedTuple):
    """How gradients are sent: `name` and `args` as in `_core/compression.py`."""

    name: str
    args: Mapping[str, float] = {}


class IslandsPlan(NamedTuple):
    """Each island updates by its own gradients, and every `sync_every` steps all agree on the weights, see
    `train/optim/islands.py`. `compress`: a code of `_core/compression.py`; None: fp32. `staleness`: so many
    steps an island goes on while what it told travels, and may be ahead of another."""

    sync_every: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compress: str | None = None
    fragments: int = 1
    staleness: int = 0
