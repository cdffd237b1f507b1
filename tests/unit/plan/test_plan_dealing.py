"""Samples to rows, and rows to ranks."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe.plan.dealing import best_fit_decreasing, cost_of_step, deal, deal_freely, idle_ratio

pytestmark = pytest.mark.unit
LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 5),
    room=st.integers(0, 100),
    mode=st.sampled_from(["best_fit", "balanced"]),
)
def test_each_sample_is_dealt_once_and_all_ranks_have_equally_many_rows(lengths, num_ranks, room, mode):
    capacity = max(lengths) + room
    dealt = deal(lengths, [float(length**2) for length in lengths], num_ranks, capacity, mode)
    rows = [row for rank in dealt for row in rank]
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(sum(lengths[sample] for sample in row) <= capacity for row in rows)
    assert len(dealt) == num_ranks
    assert len({len(rank) for rank in dealt}) == 1
    assert any(dealt[rank][-1] for rank in range(num_ranks))  # no pass in which nobody computes


@given(lengths=LENGTHS, room=st.integers(0, 50))
def test_of_best_fit_no_two_rows_fit_into_one(lengths, room):
    capacity = max(lengths) + room
    fill = [sum(lengths[sample] for sample in row) for row in best_fit_decreasing(lengths, capacity)]
    assert all(one + other > capacity for one, other in combinations(fill, 2))


def test_best_fit_takes_the_fullest_row_that_has_room():
    assert best_fit_decreasing([4, 6, 3, 7], 10) == [[2, 3], [0, 1]]
    assert best_fit_decreasing([7, 8, 2], 10) == [[1, 2], [0]]


@given(costs=st.lists(st.integers(1, 1000), min_size=1, max_size=30), num_ranks=st.integers(1, 5))
def test_balanced_work_keeps_the_bound_of_graham(costs, num_ranks):
    """Of list scheduling: the mean, and the largest without its part in that."""
    dealt = deal([1] * len(costs), [float(cost) for cost in costs], num_ranks, 1000, "balanced")
    work = [sum(costs[sample] for row in rank for sample in row) for rank in dealt]
    assert max(work) <= sum(costs) / num_ranks + max(costs) * (1 - 1 / num_ranks) + 1e-9


def test_like_work_is_computed_at_the_same_time():
    """The worst case of ranks that meet at each microbatch: [8, 1, 8, 1] beside [1, 8, 1, 8]."""
    lengths = [8, 1, 8, 1, 1, 8, 1, 8]
    dealt = deal(lengths, [float(length) for length in lengths], 2, 9, "balanced")
    work = [[sum(lengths[sample] for sample in row) for row in rank] for rank in dealt]
    assert work == [[9, 9], [9, 9]]
    # a sample that fills a row: the others are computed beside it, and beside each other
    lengths = [16, 4, 4, 4, 4]
    dealt = deal(lengths, [float(length**2) for length in lengths], 2, 16, "balanced")
    work = [[sum(lengths[sample] for sample in row) for row in rank] for rank in dealt]
    assert sorted(work) == [[16], [16]]


def test_the_rank_with_less_so_far_gets_the_heavier_row():
    lengths = [10, 9, 5, 4]
    dealt = deal(lengths, [float(length) for length in lengths], 2, 10, "balanced")
    assert [[sum(lengths[i] for i in row) for row in rank] for rank in dealt] == [[10, 4], [9, 5]]


@settings(deadline=None)
@given(
    lengths=LENGTHS,
    num_ranks=st.integers(1, 5),
    room=st.integers(0, 100),
    mode=st.sampled_from(["best_fit", "balanced"]),
)
def test_ranks_that_run_freely_have_each_sample_once_and_no_empty_row(lengths, num_ranks, room, mode):
    """Balanced work keeps the bound of Graham, whatever the rows may hold; the lightest row is the last."""
    capacity, costs = max(lengths) + room, [float(length**2) for length in lengths]
    dealt = deal_freely(lengths, costs, num_ranks, capacity, mode)
    rows = [row for rank in dealt for row in rank]
    assert sorted(sample for row in rows for sample in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[sample] for sample in row) <= capacity for row in rows)
    assert len(dealt) == num_ranks
    if mode == "balanced":
        work = [[sum(costs[sample] for sample in row) for row in rank] for rank in dealt]
        most = max(map(sum, work))
        assert most <= sum(costs) / num_ranks + max(costs) * (1 - 1 / num_ranks) + 1e-6
        assert all(rank == sorted(rank, reverse=True) for rank in work)


def test_a_rank_with_a_long_sample_has_fewer_rows():
    lengths = [16, 9, 9, 3]
    dealt = deal_freely(lengths, [float(length**2) for length in lengths], 2, 16, "balanced")
    assert dealt == [[[0]], [[1, 3], [2]]]
    assert deal_freely([5], [25.0], 3, 8, "balanced") == [[[0]], [], []]


def test_waiting_follows_from_where_ranks_meet():
    """By hand: [8, 1, 8, 1] beside [1, 8, 1, 8]. Together each microbatch takes 8. Gathered once, with four
    blocks, on GPUs: the second rank is through its first forward pass at 4/3 + 1/12, and through its first
    half of the last backward pass at 17.5 with the first rank, which has the longer way to there; its other
    half takes 8/3. With gloo they are through the first quarter of it at 17.5 together, and the second
    rank's other three take 4: 1.49 times less than together, and 1.51 was measured."""
    work = [[8.0, 1.0, 8.0, 1.0], [1.0, 8.0, 1.0, 8.0]]
    assert cost_of_step(work, "collective") == 32
    assert cost_of_step(work, "on_demand") == 18
    assert cost_of_step(work, "resident", "cuda", 4) == pytest.approx(17.5 + 8 / 3)
    assert cost_of_step(work, "resident", "cpu", 4) == pytest.approx(17.5 + 4)
    assert cost_of_step(work, "resident", "cuda", 1) == cost_of_step(work, "resident", "cpu", 1) == 18
    # who is through its first pass at 1 if alone is at 1.75 or 2.5, and 14 more are before it
    work_ahead = [[9.0, 1.0, 3.0], [3.0, 9.0, 3.0]]
    assert cost_of_step(work_ahead, "resident", "cuda", 4) == 15.75
    assert cost_of_step(work_ahead, "resident", "cpu", 4) == 16.5
    assert idle_ratio([work, work], "collective") == pytest.approx(1 - 18 / 32)
    assert idle_ratio([work], "on_demand") == 0
    assert idle_ratio([[[3.0], []]], "resident") == idle_ratio([[[3.0], []]], "collective") == 0.5
    assert idle_ratio([], "collective") == 0
