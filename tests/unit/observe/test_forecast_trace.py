"""The forecast on weeks that it was not shown, of made demand in the shape of public traces.

Published: Microsoft's Philly trace has 117,325 jobs submitted from 2017-08-07 to 2017-12-22, 850 a day
(README of msr-fiddle/philly-traces); a tenth of that here. Durations have a heavy tail, as
those of Alibaba's PAI (Weng et al., MLaaS in the Wild, NSDI 2022). Ours: log-normal, with a median
of 23 minutes, a 90th percentile of 4.5 hours and at most 9 days; 0.6 of the jobs on weekends, the profile
over a day, GPUs of a job, how much whole days differ, and growth.
"""

from __future__ import annotations

import math
import random
from statistics import fmean

import pytest

from mlpipe.observe.demand import DAY_SECONDS, Use, gpu_hours_by_day, history
from mlpipe.observe.forecast import BASELINE, COVERED_RATIO, MODEL, forecast, holt_winters, seasonal_naive

pytestmark = pytest.mark.unit
JOBS_A_DAY = 117_325 / 138
MEDIAN_SECONDS = 23 * 60
SIGMA = (
    math.log(4.5 * 60 / 23) / 1.2816
)  # of the logarithm: the 90th percentile is 1.2816 of it above the median
NUM_GPUS = (1, 2, 4, 8, 16)
GPU_WEIGHTS = (70, 12, 8, 8, 2)
WEEKS, HELD_OUT = 14, 14


def trace(seed: int, weekly_growth: float) -> list[float]:
    """GPU-hours of each day."""
    rng = random.Random(seed)
    uses = []
    for day in range(WEEKS * 7):
        mean = JOBS_A_DAY / 10 * (1 + weekly_growth) ** (day / 7) * (1.0 if day % 7 < 5 else 0.6)
        for _ in range(round(mean * rng.lognormvariate(0, 0.1))):
            hour = rng.triangular(0, 24, 15)
            seconds = min(rng.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA), 9 * DAY_SECONDS)
            num_gpus = rng.choices(NUM_GPUS, GPU_WEIGHTS)[0]
            uses.append(Use("GPU", num_gpus, day * DAY_SECONDS + hour * 3600, seconds))
    return history(gpu_hours_by_day(uses)["GPU"], WEEKS * 7)


def held_out(growth: float, methods, seeds=range(10)) -> tuple[float, float]:
    """Sum of absolute errors by the sum of what was, and the share of days in the interval."""
    errors, was, inside = 0.0, 0.0, []
    for seed in seeds:
        days = trace(seed, growth)
        ahead = forecast(days[:-HELD_OUT], HELD_OUT, methods)
        assert ahead is not None
        for true, guess, low, high in zip(
            days[-HELD_OUT:], ahead.days, ahead.lower, ahead.upper, strict=True
        ):
            errors, was = errors + abs(true - guess), was + true
            inside.append(low <= true <= high)
    return errors / was, fmean(inside)


@pytest.mark.parametrize("growth", [0.0, 0.03])
def test_the_interval_holds_as_many_days_as_it_says(growth):
    error_ratio, covered_ratio = held_out(growth, {BASELINE: seasonal_naive})
    print(f"growth {growth}: {BASELINE} off by {error_ratio:.1%}, {covered_ratio:.0%} in the interval")
    assert covered_ratio == pytest.approx(COVERED_RATIO, abs=0.12)


def test_the_better_of_two_is_no_worse_than_the_baseline():
    pytest.importorskip("statsmodels", reason="statsmodels is not installed: pip install 'mlpipe[forecast]'")
    baseline, _ = held_out(0.0, {BASELINE: seasonal_naive}, range(3))
    both, covered_ratio = held_out(0.0, {BASELINE: seasonal_naive, MODEL: holt_winters}, range(3))
    print(
        f"the better of two: off by {both:.1%} (baseline {baseline:.1%}), {covered_ratio:.0%} in the interval"
    )
    assert both < baseline
    assert covered_ratio > 0.6
