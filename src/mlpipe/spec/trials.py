"""From a `sweep` to the values of its trials, and to the overrides that make runs of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any

from mlpipe.spec.sweep import Choices, Interval, Sweep, candidates

Values = dict[str, Any]  # by the full key
_NUM_TRIES = 10_000  # to draw what was not drawn before
_DIGITS = 6  # of a number that is drawn: enough to tell two apart, few enough to read


def axes(sweep: Sweep) -> dict[str, Choices | Interval]:
    """By key, as the file lists them."""
    return {key: candidates(written) for key, written in sweep.over.items()}


def planned(sweep: Sweep) -> list[Values]:
    """Of all trials that are known before the first one starts: the same sweep gives the same ones, in the
    same order. None of `tpe`, which learns from those before."""
    if sweep.method == "tpe":
        return []
    return list(islice(_grid(sweep) if sweep.method == "grid" else _drawn(sweep), sweep.trials))


def num_trials(sweep: Sweep) -> int:
    """How many there will be."""
    if sweep.trials is not None:
        return sweep.trials
    return math.prod(len(axis.values) for axis in axes(sweep).values() if isinstance(axis, Choices))


def overrides_of(values: Mapping[str, Any]) -> tuple[str, ...]:
    """`--set` of the trial with these values: the pipeline without its sweep. JSON is YAML."""
    return ("sweep=null", *(f"{key}={json.dumps(value)}" for key, value in values.items()))


def _grid(sweep: Sweep) -> Iterator[Values]:
    """The last key changes fastest."""
    spread = axes(sweep)
    lists = [axis.values for axis in spread.values() if isinstance(axis, Choices)]
    return (dict(zip(spread, point, strict=True)) for point in product(*lists))


def _drawn(sweep: Sweep) -> Iterator[Values]:
    """Without repeats, as long as there is anything else to be found."""
    spread = axes(sweep)
    generator = random.Random(sweep.seed)
    seen = set[str]()
    while True:
        for _ in range(_NUM_TRIES):
            values = {key: _draw(axis, generator) for key, axis in spread.items()}
            if json.dumps(values) not in seen:
                break
        seen.add(json.dumps(values))
        yield values


def _draw(axis: Choices | Interval, generator: random.Random) -> Any:
    if isinstance(axis, Choices):
        return axis.values[generator.randrange(len(axis.values))]
    share = generator.random()
    if axis.is_whole and not axis.log:
        return min(int(axis.low + share * (axis.high - axis.low + 1)), axis.high)
    if axis.log:
        value = math.exp(math.log(axis.low) + share * (math.log(axis.high) - math.log(axis.low)))
    else:
        value = axis.low + share * (axis.high - axis.low)
    return rounded(axis, value)


def rounded(axis: Interval, value: float) -> float:
    """To a number that can be read, and lies within."""
    value = round(value) if axis.is_whole else float(f"{value:.{_DIGITS}g}")
    return min(max(value, axis.low), axis.high)
