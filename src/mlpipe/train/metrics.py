"""Metrics over held-out samples: objects with `update(outputs, batch)` and `compute()`, one on each rank,
whose states are made one before `compute`, so that it sees every sample exactly once on any number of ranks.

How a state is reduced over ranks, by the kind of the object:

- of torchmetrics (also a MetricCollection): each state as its `dist_reduce_fx` says. One that is a mean over
  ranks is refused, since ranks may have different numbers of samples.
- with `merge_state(others)`, as torcheval's: by that method.
- any other: by its attributes. What `update` adds to a number or a tensor is added up, lists are put one
  behind the other in the order of the ranks, dicts are reduced key by key; `reduce = {"worst": "max"}` in the
  class says "max" or "min" instead of "sum". Attributes that `update` leaves alone are constants.

`update` gets what the model's forward returned, and the batch as the model got it. A metric of torchmetrics
or torcheval, which knows no batches, gets its logits (N, classes) and the targets (N) that count instead,
unless its second parameter is called `batch`.
"""

from __future__ import annotations

import copy
import inspect
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mlpipe._core.errors import TrainError
from mlpipe.plan.entry import Entry
from mlpipe.plan.validation import MetricPlan
from mlpipe.train.contract import check_targets, logits_of
from mlpipe.train.loss import IGNORED
from mlpipe.train.model import Batch, load_entry
from mlpipe.train.world import World

_ACCURACY = MetricPlan("accuracy", "mlpipe.train.metrics:Accuracy")


class Accuracy:
    """The share of targets to which the model gives the largest logit."""

    def __init__(self) -> None:
        self.num_right = torch.zeros((), dtype=torch.int64)
        self.num_targets = torch.zeros((), dtype=torch.int64)

    def update(self, outputs: Any, batch: Batch) -> None:
        """`outputs`: logits (..., classes), or an object with `.logits`."""
        logits, targets = _logits_and_targets(outputs, batch, "accuracy")
        self.num_right = self.num_right + (logits.argmax(dim=-1) == targets).sum()
        self.num_targets = self.num_targets + targets.numel()

    def compute(self) -> float:
        """Between 0 and 1; NaN of nothing."""
        return int(self.num_right) / num if (num := int(self.num_targets)) else math.nan


class Metric:
    """One object of the user's on this rank, and what is done for it. `pristine`: as it was made."""

    def __init__(self, plan: MetricPlan, device: torch.device) -> None:
        """Raises TrainError (input) for an entry that makes no metric."""
        self.name = plan.name
        self.entry = plan.entry or ""
        entry = Entry(self.entry, dict(plan.args))
        make = load_entry(entry)
        try:
            made = make(**entry.args)
        except Exception as error:
            raise self.wrong(f"failed to make the metric: {type(error).__name__}: {error}") from error
        for method in ("update", "compute"):
            if not callable(getattr(made, method, None)):
                raise self.wrong(
                    f"makes a {type(made).__name__} without {method}()",
                    "return an object with `update(outputs, batch)` and `compute()`",
                )
        self.kind = _kind(made)
        if self.kind is not Plain and hasattr(made, "to"):
            made = made.to(device)
        self.pristine = made
        self.current = made
        self.takes_batch = self.kind is Plain or "batch" in inspect.signature(made.update).parameters
        self.kind.check(self)
        self.begin()

    def wrong(self, message: str, hint: str | None = None) -> TrainError:
        """Of what the user wrote."""
        return TrainError(f"metric {self.name}: {message}", where=self.entry, hint=hint, kind="input")

    def begin(self) -> None:
        """Anew, of no samples."""
        self.current = copy.deepcopy(self.pristine)
        self.num_updates = 0

    def update(self, outputs: Any, batch: Batch) -> None:
        """Samples that count, once."""
        self.num_updates += 1
        if self.takes_batch:
            self.current.update(outputs, batch)
        else:
            self.current.update(*_logits_and_targets(outputs, batch, self.entry))

    def state(self) -> Any:
        """What other ranks need of it, on the CPU; None: it saw nothing."""
        return self.kind.state(self) if self.num_updates else None

    def values(self, states: Sequence[Any]) -> dict[str, float]:
        """By name, of the states of all ranks in their order."""
        result = self.kind.merged(self, [state for state in states if state is not None]).compute()
        if not isinstance(result, Mapping):
            return {self.name: self._number(result)}
        return {f"{self.name}.{key}": self._number(value) for key, value in result.items()}

    def _number(self, value: Any) -> float:
        if _numel(value) == 1:
            value = value.item()
        if not isinstance(value, int | float):
            raise self.wrong(
                f"compute() gives {_described(value)}", "return a number, or a mapping of names to numbers"
            )
        return float(value)


class Plain:
    """By the attributes of the object."""

    @staticmethod
    def check(metric: Metric) -> None:
        for attribute, how in _rules(metric).items():
            if how not in _FOLDS:
                raise metric.wrong(f"reduce[{attribute!r}] is {how!r}", f"write one of {', '.join(_FOLDS)}")

    @staticmethod
    def state(metric: Metric) -> Any:
        before = vars(metric.pristine)
        return {
            name: _on_cpu(value)
            for name, value in vars(metric.current).items()
            if name not in before or not _same(before[name], value)
        }

    @staticmethod
    def merged(metric: Metric, states: Sequence[Any]) -> Any:
        whole, rules = copy.deepcopy(metric.pristine), _rules(metric)
        for name in dict.fromkeys(name for state in states for name in state):
            values = [state[name] for state in states if name in state]
            how = rules.get(name, "sum")
            reduced = _reduced(values, _on_cpu(vars(whole).get(name)), how)
            if reduced is _CANNOT:
                raise metric.wrong(
                    f"its attribute {name!r}, {_described(values[0])}, cannot be reduced over ranks",
                    "keep numbers, tensors, or lists and dicts of them, or define `merge_state(others)`",
                )
            local = vars(metric.current).get(name)
            setattr(whole, name, reduced.to(local.device) if isinstance(local, Tensor) else reduced)
        return whole


class Mergeable:
    """By its own `merge_state(others)`."""

    @staticmethod
    def check(metric: Metric) -> None: ...

    @staticmethod
    def state(metric: Metric) -> Any:
        return metric.current.to("cpu") if hasattr(metric.current, "to") else metric.current

    @staticmethod
    def merged(metric: Metric, states: Sequence[Any]) -> Any:
        first, *others = states or [metric.pristine]
        if others:
            first.merge_state(others)
        return first


class Torchmetrics:
    """By the reductions of its states. Its own way goes through collectives for each state, of all ranks, and
    hangs or counts twice where ranks have different numbers of lists, or the same samples."""

    @staticmethod
    def check(metric: Metric) -> None: ...

    @staticmethod
    def state(metric: Metric) -> Any:
        parts = _parts(metric.current)
        return [{name: _on_cpu(getattr(part, name)) for name in part._reductions} for part in parts]

    @staticmethod
    def merged(metric: Metric, states: Sequence[Any]) -> Any:
        whole = copy.deepcopy(metric.pristine)
        for number, part in enumerate(_parts(whole)):
            part.sync_on_compute = part._to_sync = False
            part._update_count = len(states)
            for name, how in part._reductions.items() if states else ():
                values = [state[number][name] for state in states]
                if len(values) > 1 and getattr(how, "__name__", "") == "dim_zero_mean":
                    raise metric.wrong(
                        f"its state {name!r} is a mean over ranks, which may have unequally many samples",
                        'keep a sum and a count, each with dist_reduce_fx="sum"',
                    )
                setattr(part, name, _moved(_as_told(values, how), part.device))
        return whole


def _as_told(values: list[Any], how: Callable[[Any], Any] | None) -> Any:
    """Of one state, by its `dist_reduce_fx`."""
    if len(values) == 1:
        return values[0]
    if isinstance(values[0], Tensor):
        return torch.stack(values) if how is None else how(torch.stack(values))
    return [item for value in values for item in value]


def _kind(made: Any) -> Any:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is not None and isinstance(made, torchmetrics.Metric | torchmetrics.MetricCollection):
        return Torchmetrics
    return Mergeable if callable(getattr(made, "merge_state", None)) else Plain


def _parts(made: Any) -> list[Any]:
    """The metrics of torchmetrics with states of their own: itself, and those in it."""
    return [module for module in made.modules() if hasattr(module, "_reductions")]


class Metrics:
    """All metrics of one's own that a plan asks for, and the accuracy."""

    def __init__(self, plans: Sequence[MetricPlan], world: World) -> None:
        own = [_ACCURACY if plan == MetricPlan("accuracy") else plan for plan in plans]
        self.metrics = [Metric(plan, world.device) for plan in own if plan.entry is not None]
        self.world = world

    def begin(self) -> None:
        """Anew, of no samples."""
        for metric in self.metrics:
            metric.begin()

    def update(self, outputs: Any, batch: Batch) -> None:
        """Samples that count, once. Of ranks that have the same ones, only the first that has the loss
        does."""
        if self.world.holds_loss:
            for metric in self.metrics:
                metric.update(outputs, batch)

    def values(self, beat: Callable[[str], None] = lambda name: None) -> dict[str, float]:
        """Of all samples, on every rank: one exchange for all metrics. It pickles; what is read was written
        by the other ranks of this very training. `beat` hears whose code runs."""
        if not self.metrics:
            return {}
        mine = [metric.state() if self.world.holds_loss else None for metric in self.metrics]
        gathered: list[Any] = [mine]
        if self.world.size > 1:
            gathered = [None] * self.world.size
            dist.all_gather_object(gathered, mine)
        values: dict[str, float] = {}
        for number, metric in enumerate(self.metrics):
            beat(f"the metric {metric.name}")
            values |= metric.values([states[number] for states in gathered])
        return values


def _logits_and_targets(outputs: Any, batch: Batch, entry: str) -> tuple[Tensor, Tensor]:
    """Logits (N, classes) and targets (N), of those targets that count; numbers beside numbers as they
    are."""
    logits = logits_of(outputs, entry)
    targets = batch.get("targets")
    if targets is None:
        raise TrainError(
            f"the data give {', '.join(batch)}: there are no targets",
            where=entry,
            hint="write a metric of your own: `update(outputs, batch)` gets all that there is",
            kind="input",
        )
    if targets.is_floating_point() and logits.shape == targets.shape:
        return logits, targets
    check_targets(logits, targets, entry)
    logits, targets = logits.flatten(0, -2), targets.flatten()
    counts = targets != IGNORED
    return (logits, targets) if bool(counts.all()) else (logits[counts], targets[counts])


# The attributes of a plain object.

_CANNOT: Any = object()
_FOLDS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda a, b: a + b,
    "max": lambda a, b: torch.maximum(a, b) if isinstance(a, Tensor) else np.maximum(a, b),
    "min": lambda a, b: torch.minimum(a, b) if isinstance(a, Tensor) else np.minimum(a, b),
}


def _rules(metric: Metric) -> Mapping[str, str]:
    declared = getattr(metric.pristine, "reduce", {})
    return declared if isinstance(declared, Mapping) else {}


def _reduced(values: list[Any], initial: Any, how: str) -> Any:
    """`values` of the ranks that changed it, `initial` as it was made. Of a sum, what each rank added counts:
    a state need not begin at 0."""
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, dict):
        before = initial if isinstance(initial, dict) else {}
        keys = dict.fromkeys(key for value in values for key in value)
        reduced = copy.copy(first)  # of its class
        for key in keys:
            reduced[key] = _reduced([value[key] for value in values if key in value], before.get(key), how)
        return _CANNOT if any(value is _CANNOT for value in reduced.values()) else reduced
    if isinstance(first, list):
        return _reduced_lists(values, initial if isinstance(initial, list) else [], how)
    if not isinstance(first, int | float | Tensor | np.ndarray | np.generic):
        return _CANNOT
    if how != "sum":
        return fold(_FOLDS[how], values)
    if initial is None:
        return fold(_FOLDS["sum"], values)
    return fold(_FOLDS["sum"], [value - initial for value in values], initial)


def _reduced_lists(values: list[list[Any]], before: list[Any], how: str) -> Any:
    """Item by item where each still has as many as before; else what was appended, rank after rank."""
    if before and all(len(value) == len(before) for value in values):
        items = zip(*values, strict=True)
        reduced = [_reduced(list(each), one, how) for each, one in zip(items, before, strict=True)]
        return _CANNOT if any(item is _CANNOT for item in reduced) else reduced
    if not all(_same(before, value[: len(before)]) for value in values):
        return _CANNOT
    return before + [item for value in values for item in value[len(before) :]]


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return (
            isinstance(before, Tensor)
            and isinstance(now, Tensor)
            and before.shape == now.shape
            and bool(torch.equal(before, now.to(before.device)))
        )
    if isinstance(before, np.ndarray) or isinstance(now, np.ndarray):
        return bool(np.array_equal(before, now))
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_same, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return before.keys() == now.keys() and all(_same(before[key], now[key]) for key in now)
    if type(before) is not type(now):
        return False
    if isinstance(before, int | float | str | bytes | type(None)):
        return before == now or (before != before and now != now)
    try:  # an object of any other class: is a copy of what it was
        return pickle.dumps(before) == pickle.dumps(now)
    except Exception:  # a function, a lock: no state
        return True


def _on_cpu(value: Any) -> Any:
    return _moved(value, torch.device("cpu"))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, list | tuple):
        return type(value)([_moved(item, device) for item in value])
    if isinstance(value, dict):
        moved = copy.copy(value)
        moved.update({key: _moved(item, device) for key, item in value.items()})
        return moved
    return value


def _numel(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    return int(value.size) if isinstance(value, np.ndarray | np.generic) else 0


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"
