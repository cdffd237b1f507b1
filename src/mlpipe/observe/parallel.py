"""Parallel coordinates as data: an axis for each key that was varied and one for the metric, and a line for
each trial. `templates/parallel.svg.jinja` draws it; as in `plots`, a line shows its numbers when the pointer
is over it, and nothing runs."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlpipe.observe.axes import LinearScale, label, ticks

WIDTH, HEIGHT = 1160, 300
TOP, BOTTOM = 34, 276
_LEFT, _RIGHT = 70, 1060  # of the first and the last axis
_LOG_FACTOR = 50.0  # from the least to the most, above which an axis is logarithmic
_MOST_TICKS = 7


@dataclass(frozen=True)
class Coordinate:
    """`values`: of each trial, in the order of the lines; None: it has none."""

    name: str
    values: Sequence[Any]


@dataclass(frozen=True)
class Axis:
    """At `x` pixels. `ticks`: (y in pixels, words)."""

    name: str
    x: float
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True)
class Line:
    """`d` as SVG has it; `text`: what is shown when the pointer is over it."""

    colour: str
    d: str
    text: str
    is_best: bool


@dataclass(frozen=True)
class ParallelPlot:
    """A whole drawing. The best line is the last, over all others."""

    axes: Sequence[Axis]
    lines: Sequence[Line]
    width: int = WIDTH
    height: int = HEIGHT
    top: int = TOP
    bottom: int = BOTTOM


def parallel_plot(coordinates: Sequence[Coordinate], about: Sequence[tuple[str, str]]) -> ParallelPlot:
    """`about`: (colour, words) of each line, the best first. A line ends at the first axis on which it has no
    value."""
    last = max(len(coordinates) - 1, 1)
    axes, columns = [], []
    for number, one in enumerate(coordinates):
        marks, positions = _spread(one.values)
        axes.append(Axis(one.name, round(_LEFT + (_RIGHT - _LEFT) * number / last, 1), marks))
        columns.append(positions)
    lines = []
    for index, (colour, text) in enumerate(about):
        points = []
        for axis, positions in zip(axes, columns, strict=True):
            if (y := positions[index]) is None:
                break
            points.append(f"{axis.x:.1f} {y:.1f}")
        lines.append(Line(colour, "M" + "L".join(points) if points else "", text, index == 0))
    return ParallelPlot(axes, lines[::-1])


def _spread(values: Sequence[Any]) -> tuple[list[tuple[float, str]], list[float | None]]:
    """The ticks of an axis, and where on it each value lies."""
    known = [value for value in values if value is not None]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        return _of_numbers(values, sorted(set(known)))
    words = {json.dumps(value, sort_keys=True): value for value in known}
    scale = LinearScale(-0.5, len(words) - 0.5, BOTTOM, TOP)
    places = {text: round(scale(number), 1) for number, text in enumerate(words)}
    named = [(places[text], value if isinstance(value, str) else text) for text, value in words.items()]
    return named, [None if value is None else places[json.dumps(value, sort_keys=True)] for value in values]


def _of_numbers(
    values: Sequence[Any], known: Sequence[float]
) -> tuple[list[tuple[float, str]], list[float | None]]:
    """Few values are ticks themselves; else round numbers, or powers of ten."""
    if not known:
        return [], [None] * len(values)
    is_log = known[0] > 0 and known[-1] / known[0] >= _LOG_FACTOR

    def convert(value: float) -> float:
        return math.log10(value) if is_log else float(value)

    low, high = convert(known[0]), convert(known[-1])
    air = (high - low) * 0.05 or max(0.5, abs(high) * 1e-9)
    scale = LinearScale(low - air, high + air, BOTTOM, TOP)
    if len(known) <= _MOST_TICKS:
        marks = [(value, f"{value:.4g}") for value in known]
    elif is_log:
        marks = [(10.0**power, f"{10.0**power:.3g}") for power in range(math.ceil(low), math.floor(high) + 1)]
    else:
        at = ticks(low, high)
        marks = [(value, label(value, at[1] - at[0] if len(at) > 1 else 1.0)) for value in at]
    placed = [(round(scale(convert(value)), 1), words) for value, words in marks]
    return placed, [None if value is None else round(scale(convert(value)), 1) for value in values]
