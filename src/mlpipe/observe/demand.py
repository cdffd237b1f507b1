"""How many GPU-hours were wanted on which day, by class of GPUs. No I/O, no clock.

Days are UTC's, counted from 1970-01-01: a day has 24 hours whatever the season, so that a quota of N GPUs is
24 N GPU-hours a day.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DAY_SECONDS = 86400


@dataclass(frozen=True)
class Use:
    """`num_gpus` of one class for `seconds`, from when they were asked for, which is no later than when they
    came: demand that a full cluster puts off belongs to the day on which it arose. Unix seconds."""

    gpu_class: str
    num_gpus: int
    asked: float
    seconds: float


def day_of(time: float) -> int:
    """The day in which a time (Unix seconds) lies."""
    return int(time // DAY_SECONDS)


def gpu_hours_by_day(uses: Iterable[Use]) -> dict[str, dict[int, float]]:
    """By class, then by day; days without any are left out. What runs over midnight counts on both days, so
    that the sum over the days is that over the uses."""
    hours: dict[str, dict[int, float]] = {}
    for use in uses:
        begin, end = use.asked, use.asked + use.seconds
        while begin < end:
            day = day_of(begin)
            until = min(end, float((day + 1) * DAY_SECONDS))
            of_class = hours.setdefault(use.gpu_class, {})
            of_class[day] = of_class.get(day, 0.0) + use.num_gpus * (until - begin) / 3600
            begin = until
    return hours


def history(hours: dict[int, float], today: int) -> list[float]:
    """GPU-hours of each whole day, from the first one with any to yesterday."""
    return [hours.get(day, 0.0) for day in range(min(hours, default=today), today)]


def short_on(gpu_hours: Sequence[float], num_gpus: float) -> int | None:
    """The first of these days on which a quota of so many GPUs has fewer GPU-hours; None: none."""
    return next((index for index, wanted in enumerate(gpu_hours) if wanted > num_gpus * 24), None)
