"""`sweep`: the same pipeline again and again with other values, each time a run of its own. The rules between
these keys and the rest of the file are in `spec/sweep_rules.py`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from mlpipe._core.gate import BUILT_IN
from mlpipe.spec import fields as f
from mlpipe.spec.base import SpecModel

MAX_TRIALS = 1000
DEFAULT_ETA = 3
ID_CHARACTERS = 58  # of a sweep: its trials' ids are longer by a number of up to four digits
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})")
_INTERVAL_KEYS = {"min", "max", "log"}


@dataclass(frozen=True)
class Choices:
    """One of these. JSON."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Interval:
    """Anything from `low` to `high`, both included; whole numbers where both are. `log`: their logarithm is
    drawn evenly."""

    low: float
    high: float
    log: bool

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers are meant."""
        return isinstance(self.low, int) and isinstance(self.high, int)


def candidates(written: Any) -> Choices | Interval:
    """What a value of `over` means: a list, `0..3` (both ends included), or {min, max, log}. Raises a
    PydanticCustomError of `fields.wrong` for anything else."""
    if isinstance(written, str) and (ends := _RANGE.fullmatch(written)):
        first, last = int(ends[1]), int(ends[2])
        if last < first:
            raise f.wrong(f"{written!r} holds nothing", f"write {last}..{first}")
        if last - first >= MAX_TRIALS:
            raise f.wrong(f"{written!r} is more than {MAX_TRIALS} values", "write {min: ..., max: ...}")
        return Choices(range(first, last + 1))
    if isinstance(written, list):
        if not written:
            raise f.wrong("a list without values", "write at least one")
        return Choices(written)
    if isinstance(written, dict):
        return _interval(written)
    raise f.wrong(
        "these are no values", "write a list, a range like 0..3, or {min: 1e-5, max: 1e-2, log: true}"
    )


def _interval(written: dict[str, Any]) -> Interval:
    odd = sorted(written.keys() - _INTERVAL_KEYS)
    if odd:
        raise f.wrong(f"unknown key {odd[0]!r}", "an interval has min, max and log")
    low, high, log = written.get("min"), written.get("max"), written.get("log", False)
    for end in (low, high):
        if isinstance(end, bool) or not isinstance(end, int | float):
            raise f.wrong("an interval needs two numbers", "write like {min: 1e-5, max: 1e-2, log: true}")
    assert low is not None
    assert high is not None
    if not isinstance(log, bool):
        raise f.wrong("log is true or false", "write log: true")
    if low >= high:
        raise f.wrong(f"min {low} is not below max {high}", "swap them, or write a list")
    if log and low <= 0:
        raise f.wrong(f"min {low} has no logarithm", "write a min above 0, or leave log away")
    return Interval(low, high, log)


def _known(written: Any) -> Any:
    candidates(written)
    return written


_VALUES_SCHEMA = {
    "anyOf": [
        {"type": "array", "minItems": 1},
        {"type": "string", "pattern": f"^(?:{_RANGE.pattern})$"},
        {
            "type": "object",
            "properties": {"min": {"type": "number"}, "max": {"type": "number"}, "log": {"type": "boolean"}},
            "required": ["min", "max"],
            "additionalProperties": False,
        },
    ]
}
Values = Annotated[f.Json, AfterValidator(_known), Field(json_schema_extra=_VALUES_SCHEMA)]


class Metric(SpecModel):
    """What trials are compared by."""

    name: f.Text = Field(
        "val_loss",
        description="Of an evaluation, else of the last validation (`accuracy` is `val_accuracy`, too); or "
        "`loss`, the training's, a mean over its last 20 steps.",
    )
    mode: Literal["min", "max"] | None = Field(
        None, description="Whether less or more is better; has to be said of a metric of yours."
    )

    @property
    def direction(self) -> Literal["min", "max"]:
        """`mode`, or what mlpipe's own metrics have."""
        return self.mode or BUILT_IN.get(self.name.removeprefix("val_"), "min")


class PromoteBest(SpecModel):
    """The best trial's model into the registry."""

    as_: f.Name = Field(alias="as", description="Name of the model.")
    alias: f.Name | None = Field(None, description="Points to this version from now on.")


class Sweep(SpecModel):
    """The pipeline as several runs that differ in some values, and the best of them."""

    over: dict[f.Text, Values] = Field(
        description="Values by key, which is one of `--set`; of the only training also without its stage: "
        "`optimizer.lr`, `seed`. A list, a range of whole numbers like `0..3` (both included), or "
        "`{min: 1e-5, max: 1e-2, log: true}`.",
        min_length=1,
    )
    method: Literal["grid", "random", "asha", "tpe"] = Field(
        "grid",
        description="`grid`: all combinations of values. `random`: drawn ones, as many as `trials`. `asha`: "
        "the same, and what is not among the best at some step is stopped. `tpe`: what Optuna suggests from "
        "those before.",
    )
    trials: Annotated[int, Field(ge=1, le=MAX_TRIALS)] | None = Field(
        None, description="How many; a grid has as many as it has combinations."
    )
    max_parallel: f.FewCount = Field(
        1,
        description="Trials at a time. On this machine each gets its part of the CPUs, GPUs and memory.",
    )
    metric: Metric = Field(
        default_factory=lambda: Metric.model_construct(), description="By which one is the best."
    )
    seed: f.CountOrZero = Field(0, description="Of what is drawn.")
    eta: Annotated[int, Field(ge=2, le=100)] | None = Field(
        None, description="Of `asha`: one in so many goes on at each rung. Default: 3."
    )
    min_steps: f.Count | None = Field(
        None,
        description="Of `asha`: the first rung; each other one is `eta` times as far. Default: a 27th of the "
        "training's steps.",
    )
    promote: PromoteBest | None = Field(None, description="What becomes of the best one at the end.")
