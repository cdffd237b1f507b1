"""Axes of a chart: from values to positions, round numbers, and few bins for many points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

HUGE = 1e100  # beyond it arithmetic on the axis overflows; no measurement gets there

Point = tuple[float, float | None]


@dataclass(frozen=True)
class Bin:
    """Points with x in [first, last]. `mean` is None when none of them was finite."""

    first: float
    last: float
    mean: float | None
    low: float
    high: float

    @property
    def middle(self) -> float:
        """Where it is drawn."""
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class LinearScale:
    """Maps [low, high] onto [start, end], linearly."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def finite(value: float | None) -> bool:
    """Whether it can be drawn."""
    return value is not None and -HUGE < value < HUGE  # false for NaN


def domain(values: Iterable[float], *, zero: bool) -> tuple[float, float]:
    """Bounds for an axis that holds all `values`: never empty, with a little air; from 0 up if `zero`."""
    known = list(values)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    air = (high - low) * 0.05
    if air <= abs(high) * 1e-9:  # all equal, or too near to tell apart
        air = abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - air), high + air


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high], evenly spaced by 1, 2 or 5 times a power of ten: at least 2, at most
    `most`, which is 5 or more."""
    if not low < high:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (power * factor for factor in (1, 2, 5, 10, 20, 50)):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [number * step for number in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """As many digits as ticks `step` apart need."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if digits > 6 or abs(value) >= 1e7:
        return f"{value:.3g}"
    text = f"{value:,.{digits}f}"
    return text.replace(",", " ") if abs(value) >= 10_000 else text.replace(",", "")


def into_bins(points: Sequence[Point], most: int) -> list[Bin]:
    """At most `most` bins of equally many points; every point is in exactly one."""
    size = max(1, -(-len(points) // most))
    bins = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        known = [y for _, y in part if y is not None and -HUGE < y < HUGE]
        mean = sum(known) / len(known) if known else None
        bins.append(Bin(part[0][0], part[-1][0], mean, min(known, default=0.0), max(known, default=0.0)))
    return bins
