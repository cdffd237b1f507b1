"""The `optimizer` of a training: one mapping for each name in `_core/optimizers.py`, whose arguments stand
beside what all have in common, and one for an optimizer of the user's own.

The keys keep one order, since the digest of a pipeline is of its text: pydantic takes the fields of the last
base class first.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union

from pydantic import Discriminator, Field, Tag, create_model

from mlpipe._core import optimizers
from mlpipe._core.optimizers import OPTIMIZERS, Argument
from mlpipe.spec import fields as f
from mlpipe.spec.base import OnNeedOf, SpecModel, on_need
from mlpipe.spec.problems import Problem
from mlpipe.spec.tree import Node, get, items_of, problem_of_key, text_of

if TYPE_CHECKING:
    from mlpipe.spec.optimizer_parts import OwnSchedule as OwnSchedule
    from mlpipe.spec.optimizer_parts import ParameterGroup
else:
    _parts = OnNeedOf("optimizer_parts")
    OwnSchedule, ParameterGroup = _parts.OwnSchedule, _parts.ParameterGroup


def _lr(default: float) -> Any:
    return (f.Positive, Field(default, description="Peak learning rate."))


def _tag_of_schedule(value: Any) -> str:
    return "OwnSchedule" if isinstance(value, dict | OwnSchedule) else "schedule"


_Named = Literal["constant", "cosine", "linear", "wsd", "polynomial"]
_Schedule = Annotated[
    Annotated[_Named, Tag("schedule")] | Annotated[OwnSchedule, Tag("OwnSchedule")],
    Discriminator(_tag_of_schedule),
]


def _schedule(default: str) -> Any:
    return Field(
        default,
        description="Learning rate after the warm-up. `wsd`: constant, then a linear decay; `polynomial`: "
        "linear, to a power. Or your own `entry`.",
    )


class Optimizer(SpecModel):
    """What every optimizer has: the rule of the learning rate and the clipping of the gradients, which are
    mlpipe's own."""

    grad_clip: f.NotNegative | None = Field(
        None,
        description="Largest global gradient norm; 0 switches it off. Default: 1, or 0 beside `clip_value`.",
    )
    clip_value: f.Positive | None = Field(
        None, description="Largest absolute value in the gradient, to which larger ones are cut."
    )
    schedule: _Schedule = _schedule("cosine")
    power: f.Positive | None = Field(None, description="Of `polynomial`. Default: 1.")
    warmup_steps: f.CountOrZero = Field(0, description="Steps of linear warm-up.")
    decay_steps: f.Count | None = Field(
        None, description="Of `wsd`: steps of the final decay. Default: a tenth of all."
    )
    min_lr_ratio: f.Ratio = Field(
        0.1, description="Final learning rate as a share of the peak; of named schedules."
    )
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] | None = Field(
        None, description="Parameters with a learning rate or weight decay of their own. Default: none."
    )

    @property
    def norm_limit(self) -> float:
        """Of the gradient's norm; 0: none."""
        if self.grad_clip is not None:
            return self.grad_clip
        return 0.0 if self.clip_value is not None else 1.0


class NamedOptimizer(Optimizer):
    """One of `_core/optimizers.py`; its subclasses, one for each, are made when
    a file names one."""

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
    lr: f.Positive = _lr(3e-4)[1]


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


@cache
def _named(name: str) -> type[NamedOptimizer]:
    known = OPTIMIZERS[name]
    default = name if name == optimizers.DEFAULT else ...
    arguments: dict[str, Any] = {
        key: (_type(argument), Field(argument.default, description=argument.about))
        for key, argument in known.arguments.items()
    }
    choice: Any = (Literal[name], Field(default, description="Which optimizer."))
    own = create_model(
        f"{known.title}Arguments", __base__=SpecModel, name=choice, lr=_lr(known.lr), **arguments
    )
    bases: Any = (NamedOptimizer, own)
    others: Any = {}
    if known.schedule != Optimizer.model_fields["schedule"].default:
        others["schedule"] = (_Schedule, _schedule(known.schedule))
    made: type[NamedOptimizer] = create_model(known.title, __base__=bases, __doc__=known.about, **others)
    return made


def default_optimizer() -> NamedOptimizer:
    """Of a training that says nothing about its optimizer."""
    return _named(optimizers.DEFAULT).model_construct()


def _tag(value: Any) -> str:
    """Of the class that checks `value`. A name that is none becomes a tag that is none, which pydantic
    refuses."""
    if isinstance(value, Optimizer):
        return type(value).__name__
    if not isinstance(value, dict):
        return OPTIMIZERS[optimizers.DEFAULT].title
    if "entry" in value:
        return OwnOptimizer.__name__
    name = str(value.get("name", optimizers.DEFAULT))
    return OPTIMIZERS[name].title if name in OPTIMIZERS else name


if TYPE_CHECKING:
    AnyOptimizer: TypeAlias = NamedOptimizer | OwnOptimizer
else:
    _MODELS = {known.title: on_need(known.title, partial(_named, name)) for name, known in OPTIMIZERS.items()}
    _MODELS[OwnOptimizer.__name__] = OwnOptimizer
    _TAGGED = tuple(Annotated[model, Tag(title)] for title, model in _MODELS.items())
    AnyOptimizer = Annotated[Union[_TAGGED], Discriminator(_tag)]  # noqa: UP007 (of as many as there are)


def problems(train: Node) -> Iterator[Problem]:
    """Of the optimizer of a training: figures that do not go together."""
    micro_batch = get(train, "data", "micro_batch")
    for parent, key in ((train, "accumulation"), (get(train, "pipeline"), "microbatches")):
        number = None if parent is None else get(parent, key)
        stated = [node for node in (number, micro_batch) if node is not None and node.value != "auto"]
        if number is not None and len(stated) == 2:
            yield problem_of_key(
                number, f"{key} follows from micro_batch, which is there as well", "keep one of them"
            )
    optimizer = get(train, "optimizer")
    if optimizer is None:
        return
    schedule = get(optimizer, "schedule")
    for key, name in (("decay_steps", "wsd"), ("power", "polynomial")):
        node = get(optimizer, key)
        if node is not None and text_of(schedule) != name:
            yield problem_of_key(
                node, f"only schedule {name} has {key}", f"remove it, or write schedule: {name}"
            )
    by_norm, by_value = get(optimizer, "grad_clip"), get(optimizer, "clip_value")
    if by_norm is not None and by_norm.value and by_value is not None:
        yield problem_of_key(by_value, "grad_clip and clip_value both clip the gradient", "keep one of them")
    ema, known = get(train, "ema"), OPTIMIZERS.get(text_of(get(optimizer, "name")) or "")
    if ema is not None and ema.value is not None and known is not None and known.averages:
        yield problem_of_key(
            ema, "the optimizer keeps an average of its own, which is what counts", "remove ema"
        )
    yield from _steps(train, optimizer)
    yield from _groups(optimizer)


def _steps(train: Node, optimizer: Node) -> Iterator[Problem]:
    steps = get(train, "steps")
    for key in ("warmup_steps", "decay_steps"):
        node = get(optimizer, key)
        if node is None or steps is None or not _is_count(node) or not _is_count(steps):
            continue
        if node.value > steps.value:
            yield problem_of_key(
                node, f"{key} {node.value} is more than the {steps.value} steps", "write less"
            )


def _groups(optimizer: Node) -> Iterator[Problem]:
    seen: set[str] = set()
    for group in items_of(optimizer, "groups"):
        match = get(group, "match")
        pattern = text_of(match)
        if match is None or pattern is None:
            continue
        if pattern in seen:
            yield Problem.at(
                match.place, f"an earlier group has {pattern!r} already", "the first counts: remove one"
            )
        seen.add(pattern)
        if get(group, "lr_scale") is None and get(group, "weight_decay") is None:
            yield Problem.at(
                match.place, f"the group of {pattern!r} changes nothing", "add lr_scale or weight_decay"
            )


def _is_count(node: Node) -> bool:
    return isinstance(node.value, int) and not isinstance(node.value, bool) and node.value > 0
