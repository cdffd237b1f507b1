"""The `optimizer` of a training: one mapping for each name in `_core/optimizers.py`, whose arguments stand
beside what all have in common, and one for an optimizer of the user's own.

The keys keep one order, since the digest of a pipeline is of its text: pydantic takes the fields of the last
base class first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag, create_model

from mlpipe._core import optimizers
from mlpipe._core.optimizers import OPTIMIZERS, Argument
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel

_LR: Any = (f.Positive, Field(3e-4, description="Peak learning rate."))


class Optimizer(SpecModel):
    """What every optimizer has: the rule of the learning rate and the clipping of the gradients, which are
    mlpipe's own."""

    grad_clip: f.NotNegative = Field(1.0, description="Largest global gradient norm; 0 switches it off.")
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        "cosine", description="Learning rate after the warm-up. `wsd`: constant, then a linear decay."
    )
    warmup_steps: f.CountOrZero = Field(0, description="Steps of linear warm-up.")
    decay_steps: f.Count | None = Field(
        None, description="Of `wsd`: steps of the final decay. Default: a tenth of all."
    )
    min_lr_ratio: f.Ratio = Field(0.1, description="Final learning rate as a share of the peak.")


class NamedOptimizer(Optimizer):
    """One of `_core/optimizers.py`; its subclasses, one for each, are made below."""

    if TYPE_CHECKING:
        name: str
        lr: float

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that it alone has, as JSON."""
        return self.model_dump(mode="json", include=set(OPTIMIZERS[self.name].arguments))

    @property
    def state_bytes_per_parameter(self) -> int:
        """What it keeps between steps for each fp32 parameter."""
        return OPTIMIZERS[self.name].state_bytes_per_parameter(self.arguments)


class _Own(SpecModel):
    entry: f.EntryPath = Field(
        description="`package.module:function`, or a class: called with a list of parameters and `args`, it "
        "returns a `torch.optim.Optimizer`."
    )
    args: dict[f.Text, f.Json] = Field({}, description="Keyword arguments of the function.")
    state_bytes_per_parameter: f.FewOrZero = Field(
        8, description="What it keeps between steps for each parameter, in bytes, for the planner."
    )
    lr: f.Positive = _LR[1]


class OwnOptimizer(Optimizer, _Own):
    """An optimizer of yours. mlpipe clips the gradients and sets `lr` of all its groups."""

    @property
    def arguments(self) -> dict[str, Any]:
        """As they were written."""
        return self.args


def _type(argument: Argument) -> Any:
    if isinstance(argument.default, bool):
        return bool
    number = Annotated[float, Field(gt=argument.above, ge=argument.at_least, lt=argument.below)]
    if isinstance(argument.default, tuple):
        return Annotated[tuple[(number,) * len(argument.default)], Field(strict=False)]  # type: ignore[misc]
    return number


def _named(name: str, known: optimizers.Optimizer) -> type[NamedOptimizer]:
    default = name if name == optimizers.DEFAULT else ...
    arguments: dict[str, Any] = {
        key: (_type(argument), Field(argument.default, description=argument.about))
        for key, argument in known.arguments.items()
    }
    choice: Any = (Literal[name], Field(default, description="Which optimizer."))
    own = create_model(f"{known.title}Arguments", __base__=SpecModel, name=choice, lr=_LR, **arguments)
    bases: Any = (NamedOptimizer, own)
    made: type[NamedOptimizer] = create_model(known.title, __base__=bases, __doc__=known.about)
    return made


_NAMED = {name: _named(name, known) for name, known in OPTIMIZERS.items()}


def default_optimizer() -> NamedOptimizer:
    """Of a training that says nothing about its optimizer."""
    return _NAMED[optimizers.DEFAULT].model_construct()


def _tag(value: Any) -> str:
    """Of the class that checks `value`. A name that is none becomes a tag that is none, which pydantic
    refuses."""
    if isinstance(value, Optimizer):
        return type(value).__name__
    if not isinstance(value, dict):
        return _NAMED[optimizers.DEFAULT].__name__
    if "entry" in value:
        return OwnOptimizer.__name__
    name = str(value.get("name", optimizers.DEFAULT))
    return _NAMED[name].__name__ if name in _NAMED else name


if TYPE_CHECKING:
    AnyOptimizer = NamedOptimizer | OwnOptimizer
else:
    _TAGGED = tuple(Annotated[model, Tag(model.__name__)] for model in (*_NAMED.values(), OwnOptimizer))
    AnyOptimizer = Annotated[Union[_TAGGED], Discriminator(_tag)]  # noqa: UP007 (of as many as there are)
