"""Asynchronous successive halving: who goes on, against the published rule and over whole sweeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe.submit.sweeps.asha import goes_on, rungs

pytestmark = pytest.mark.unit
VALUES = st.lists(st.floats(-10, 10), min_size=1, max_size=40)


def top(values: list[float], eta: int, less: bool) -> list[float]:
    """Algorithm 2 of Li et al. (arXiv:1810.05934): top_k(rung, |rung| / eta); at least the best one here,
    since nobody is kept waiting."""
    return sorted(values, reverse=not less)[: max(1, len(values) // eta)]


@given(VALUES, st.integers(2, 5), st.booleans())
def test_at_each_arrival_the_top_one_in_eta_goes_on(values, eta, less):
    for number, value in enumerate(values):
        here = values[: number + 1]
        assert goes_on(value, values[:number], eta, less_is_better=less) == (value in top(here, eta, less))


@given(VALUES, st.integers(2, 5), st.booleans())
def test_one_always_goes_on_and_the_best_of_all_does(values, eta, less):
    on = [
        value
        for number, value in enumerate(values)
        if goes_on(value, values[:number], eta, less_is_better=less)
    ]
    assert (min if less else max)(values) in on


@given(st.integers(2, 5), st.integers(1, 8))
def test_of_those_that_arrive_from_the_best_to_the_worst_one_in_eta_is_left(eta, rounds):
    values = [float(number) for number in range(eta * rounds)]
    on = [goes_on(value, values[:number], eta, less_is_better=True) for number, value in enumerate(values)]
    assert on == [True] + [False] * (len(values) - 1)
    # and one that comes late and would have been within the best n / eta does
    assert goes_on(values[rounds - 1] - 0.5, values, eta, less_is_better=True)


@given(st.integers(1, 50), st.integers(1, 5000), st.integers(2, 5))
def test_rungs_grow_by_eta_and_end_before_the_training(first, steps, eta):
    found = rungs(first, steps, eta)
    assert found == [first * eta**k for k in range(len(found))]
    assert all(step < steps for step in found)
    assert first * eta ** len(found) >= steps
