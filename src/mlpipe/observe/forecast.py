"""What a series of days goes on like, judged by what was known before each of its last eight weeks' days.

Two methods stand beside each other: the seasonal naive one, and Holt-Winters' damped trend with an additive
week, which is the point forecast of ETS(A,Ad,A) (Hyndman & Athanasopoulos, Forecasting: Principles and
Practice, 3rd ed., 5.2 and 8.3), by statsmodels. Both forecast from the same origins (rolling origin, 5.10);
the one that was nearer goes on. Its errors there are the interval, so nothing is assumed of how they are
distributed: demand has heavy tails. No I/O, no clock; statsmodels is imported when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WEEK = 7
MIN_DAYS = 3 * WEEK  # two to learn from, and one to be judged by
COVERED_RATIO = 0.8  # of the days lie in the interval, if the coming ones are like those of the past
_JUDGED_DAYS = 8 * WEEK  # the last ones, from each third of which both methods forecast
_STRIDE = 3  # of origins; no divisor of a week, so that each weekday is one
_FEWEST_ERRORS = 10  # whose quantiles say something
Method = Callable[[Sequence[float], int], list[float]]


@dataclass(frozen=True)
class Judged:
    """A method on held-out days. `mean_error`: mean absolute error, in the series' unit; `error_ratio`: the
    sum of absolute errors by the sum of what was; None where that was nothing."""

    name: str
    mean_error: float
    error_ratio: float | None
    errors: tuple[tuple[float, ...], ...]  # what was minus what was forecast, by weeks ahead


@dataclass(frozen=True)
class Forecast:
    """From the day after the series. `judged`: the one that was used first."""

    days: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    judged: tuple[Judged, ...]


def seasonal_naive(series: Sequence[float], num_days: int) -> list[float]:
    """Each day is as that of the last week."""
    return [series[len(series) - WEEK + ahead % WEEK] for ahead in range(num_days)]


def holt_winters(series: Sequence[float], num_days: int) -> list[float]:
    """Level, damped trend and week, fitted to the series. Raises ImportError without statsmodels."""
    import warnings

    from statsmodels.tsa.holtwinters import ExponentialSmoothing

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that ends early is judged by its forecasts like any other
        model = ExponentialSmoothing(
            list(series), trend="add", damped_trend=True, seasonal="add", seasonal_periods=WEEK
        )
        days = [float(day) for day in model.fit(use_brute=False).forecast(num_days)]
    if not all(map(math.isfinite, days)):
        return seasonal_naive(series, num_days)
    return [max(day, 0.0) for day in days]


BASELINE = "seasonal naive"
MODEL = "Holt-Winters"


def methods() -> dict[str, Method]:
    """By name, the baseline first; the model where its library is installed."""
    from importlib.util import find_spec

    found: dict[str, Method] = {BASELINE: seasonal_naive}
    if find_spec("statsmodels") is not None:
        found[MODEL] = holt_winters
    return found


def forecast(
    series: Sequence[float], num_days: int, using: dict[str, Method], so_far: float = 0.0
) -> Forecast | None:
    """The days after `series` (one value a day, none negative), the first of which has `so_far` already. Of
    methods that are as good the first is used. None where the series has fewer than MIN_DAYS days."""
    if len(series) < MIN_DAYS:
        return None
    judged = [judge(name, method, series, num_days) for name, method in using.items()]
    judged.sort(key=lambda one: one.mean_error)
    days = using[judged[0].name](series, num_days)
    lower, upper = [], []
    for ahead, (low, high) in zip(range(num_days), _spreads(judged[0].errors, num_days), strict=True):
        lower.append(max(days[ahead] + min(low, 0.0), 0.0))
        upper.append(days[ahead] + max(high, 0.0))
    for bound in (days, lower, upper):
        bound[0] = max(bound[0], so_far)
    return Forecast(tuple(days), tuple(lower), tuple(upper), tuple(judged))


def judge(name: str, method: Method, series: Sequence[float], num_days: int) -> Judged:
    """On forecasts of up to `num_days`, of a week at least, from days of the last eight weeks, each made from
    what was before it."""
    num_days = max(num_days, WEEK)
    by_week: list[list[float]] = [[] for _ in range(-(-num_days // WEEK))]
    was = 0.0
    for origin in range(max(2 * WEEK, len(series) - _JUDGED_DAYS), len(series), _STRIDE):
        held_out = series[origin : origin + num_days]
        for ahead, (true, guess) in enumerate(
            zip(held_out, method(series[:origin], len(held_out)), strict=True)
        ):
            by_week[ahead // WEEK].append(true - guess)
            was += true
    errors = [abs(error) for week in by_week for error in week]
    total = sum(errors)
    mean, ratio = total / len(errors), total / was if was else None
    return Judged(name, mean, ratio, tuple(map(tuple, by_week)))


def _spreads(errors: Sequence[Sequence[float]], num_days: int) -> list[tuple[float, float]]:
    """Of each day ahead how far below and above its forecast it may be. A week ahead that was judged too
    rarely has the spread of the one before it, wider by the square root of their numbers, as a random walk
    from week to week would have."""
    spreads: list[tuple[float, float]] = []
    for week, own in enumerate(errors):
        if len(own) >= _FEWEST_ERRORS or not spreads:
            outside = (1 - COVERED_RATIO) / 2
            spreads.append((quantile(own, outside), quantile(own, 1 - outside)))
        else:
            wider = math.sqrt((week + 1) / week)
            spreads.append((spreads[-1][0] * wider, spreads[-1][1] * wider))
    return [spreads[ahead // WEEK] for ahead in range(num_days)]


def quantile(values: Sequence[float], ratio: float) -> float:
    """Between the two nearest of the sorted values, linearly."""
    ordered = sorted(values)
    at = ratio * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)
