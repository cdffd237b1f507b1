"""GPU-hours by day, and what is said of the coming ones."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe.observe.demand import DAY_SECONDS, Use, day_of, gpu_hours_by_day, history, short_on
from mlpipe.observe.forecast import (
    BASELINE,
    MIN_DAYS,
    MODEL,
    forecast,
    holt_winters,
    judge,
    quantile,
    seasonal_naive,
)

pytestmark = pytest.mark.unit
MONDAY = 20_775 * DAY_SECONDS  # 2026-11-18, UTC
USES = st.builds(
    Use,
    st.sampled_from(["H100", "A100"]),
    st.integers(1, 512),
    st.floats(0, 2e9),
    st.floats(0, 20 * DAY_SECONDS),
)


@given(st.lists(USES, max_size=8))
def test_the_hours_of_the_days_are_those_of_the_uses(uses):
    by_day = gpu_hours_by_day(uses)
    for name in ("H100", "A100"):
        whole = math.fsum(use.num_gpus * use.seconds / 3600 for use in uses if use.gpu_class == name)
        assert math.fsum(by_day.get(name, {}).values()) == pytest.approx(whole, rel=1e-6, abs=0.2)
    days = [day for of_class in by_day.values() for day in of_class]
    assert all(any(day_of(u.asked) <= day <= day_of(u.asked + u.seconds) for u in uses) for day in days)


def test_a_run_over_midnight_counts_on_both_days():
    use = Use("H100", 8, MONDAY + 23 * 3600, 3 * 3600)
    assert gpu_hours_by_day([use]) == {"H100": {20_775: 8.0, 20_776: 16.0}}


def test_a_history_has_idle_days_and_ends_yesterday():
    assert history({10: 5.0, 13: 2.0, 14: 9.0}, today=14) == [5.0, 0.0, 0.0, 2.0]
    assert history({14: 9.0}, today=14) == []
    assert history({}, today=14) == []


def test_a_weekly_pattern_is_forecast_exactly():
    week = [100.0, 120.0, 140.0, 130.0, 90.0, 20.0, 10.0]
    series = (week * 5)[:-2]  # the next day is a Saturday
    ahead = forecast(series, 10, {BASELINE: seasonal_naive})
    assert ahead is not None
    assert ahead.days == ahead.lower == ahead.upper == tuple((week * 3)[5:15])
    assert ahead.judged[0].mean_error == ahead.judged[0].error_ratio == 0.0


def test_of_the_first_day_no_less_is_forecast_than_it_has_already():
    known = {BASELINE: seasonal_naive}
    series = [float(day % 5) for day in range(40)]
    before, after = forecast(series, 3, known), forecast(series, 3, known, so_far=100.0)
    assert after.days == (100.0, *before.days[1:])
    assert after.lower == (100.0, *before.lower[1:])
    assert after.upper == (100.0, *before.upper[1:])
    assert forecast(series, 3, known, so_far=before.lower[0]) == before


def test_below_three_weeks_nothing_is_forecast():
    assert forecast([1.0] * (MIN_DAYS - 1), 7, {BASELINE: seasonal_naive}) is None
    assert forecast([1.0] * MIN_DAYS, 90, {BASELINE: seasonal_naive}) is not None


def test_no_day_is_judged_by_what_came_after_it():
    series = [float(day) for day in range(60)]
    seen = []

    def spy(known, num_days):
        assert list(known) == series[: len(known)]
        seen.append((len(known), num_days))
        return [series[len(known) + ahead] - 1.0 for ahead in range(num_days)]

    judged = judge("spy", spy, series, 14)
    assert all(origin >= 14 and origin + num_days <= 60 for origin, num_days in seen)
    assert judged.mean_error == 1.0
    assert {error for week in judged.errors for error in week} == {1.0}


def test_the_better_method_is_used_and_its_errors_are_the_interval():
    series = [100.0 + day for day in range(70)]
    ahead = forecast(
        series, 14, {BASELINE: seasonal_naive, "drift": lambda s, n: [s[-1] + 1 + i for i in range(n)]}
    )
    assert ahead is not None
    assert [one.name for one in ahead.judged] == ["drift", BASELINE]
    assert ahead.days == ahead.upper == tuple(170.0 + i for i in range(14))
    lags = forecast(series, 14, {BASELINE: seasonal_naive})
    assert lags is not None  # it is 7 or 14 too low, which the interval knows
    assert [high - day for day, high in zip(lags.days, lags.upper, strict=True)] == [7.0] * 7 + [14.0] * 7
    assert lags.lower == lags.days


def test_weeks_that_were_never_judged_are_wider():
    rng = random.Random(3)
    series = [max(0.0, rng.gauss(100, 20)) for _ in range(MIN_DAYS)]
    ahead = forecast(series, 28, {BASELINE: seasonal_naive})
    assert ahead is not None
    widths = [ahead.upper[7 * week] - ahead.days[7 * week] for week in range(4)]
    assert widths[0] > 0
    assert widths[3] == pytest.approx(2 * widths[0])
    assert min(ahead.lower) >= 0


def test_nothing_but_idle_days():
    ahead = forecast([0.0] * 30, 7, {BASELINE: seasonal_naive})
    assert ahead is not None
    assert ahead.days == ahead.upper == (0.0,) * 7
    assert ahead.judged[0].error_ratio is None


def test_a_quota_is_short_on_the_first_day_above_it():
    assert short_on([24.0, 48.0, 48.5, 100.0], 2) == 2
    assert short_on([24.0, 48.0], 2) is None


def test_quantiles_are_between_the_nearest():
    assert [quantile([3.0, 1.0, 2.0], ratio) for ratio in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.5, 2.0, 3.0]


def test_the_library_beats_the_baseline_where_demand_grows():
    pytest.importorskip("statsmodels", reason="statsmodels is not installed: pip install 'mlpipe[forecast]'")
    rng = random.Random(5)
    series = [(100 + 2 * day) * (1.0 if day % 7 < 5 else 0.5) + rng.gauss(0, 10) for day in range(90)]
    ahead = forecast(series, 14, {BASELINE: seasonal_naive, MODEL: holt_winters})
    assert ahead is not None
    assert [one.name for one in ahead.judged] == [MODEL, BASELINE]
    assert holt_winters([0.0] * 30, 7) == [0.0] * 7
