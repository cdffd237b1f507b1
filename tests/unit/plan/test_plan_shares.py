"""Work follows speed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlpipe.plan.dealing import deal_freely
from mlpipe.plan.shares import Shares, SharesOfStages, bounds

pytestmark = pytest.mark.unit
SPEEDS = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=9)


def counts(total: int, speeds: list[float]) -> list[int]:
    return [end - begin for begin, end in pairwise(bounds(total, len(speeds), speeds))]


@given(total=st.integers(0, 60), speeds=SPEEDS)
def test_every_sample_is_somebodys_and_no_other_shares_are_done_earlier(total, speeds):
    """One at the least for each rank that can have one: its speed would not be known otherwise."""
    found = counts(total, speeds)
    assert sum(found) == total
    assert min(found) >= (total >= len(speeds))
    last = max(count / speed for count, speed in zip(found, speeds, strict=True))
    for giver, taker in ((i, j) for i in range(len(speeds)) for j in range(len(speeds)) if i != j):
        if found[giver] / speeds[giver] == last and found[giver] > 1:
            assert (found[taker] + 1) / speeds[taker] >= last - 1e-9


def test_equal_speeds_are_even_shares_and_half_the_speed_is_half_the_work():
    assert bounds(10, 4) == [0, 2, 5, 7, 10]
    assert sorted(counts(10, [1.0] * 4)) == [2, 2, 3, 3]
    assert counts(12, [1.0, 0.5]) == [8, 4]
    assert counts(16, [1.0, 0.5]) == [11, 5]  # done at 11; 10 and 6 would be at 12
    assert counts(3, [1.0, 0.01, 1.0]) == [1, 1, 1]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    speeds=SPEEDS,
    mode=st.sampled_from(["best_fit", "balanced"]),
)
def test_packed_samples_are_dealt_once_whatever_the_speeds(lengths, speeds, mode):
    dealt = deal_freely(lengths, list(map(float, lengths)), len(speeds), 60, mode, speeds)
    assert sorted(sample for rows in dealt for row in rows for sample in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[sample] for sample in row) <= 60 for rows in dealt for row in rows)


def test_packed_work_follows_speed():
    lengths = [9, 8, 7, 6, 5, 4, 3, 2, 1] * 4
    dealt = deal_freely(lengths, [float(n * n) for n in lengths], 3, 40, "balanced", [1.5, 1.0, 0.5])
    work = [sum(lengths[i] ** 2 for row in rows for i in row) for rows in dealt]
    assert [one / sum(work) for one in work] == pytest.approx([1 / 2, 1 / 3, 1 / 6], rel=0.05)
    assert deal_freely([4] * 8, [1.0] * 8, 2, 4, "best_fit", [1.5, 0.5]) == [
        [[0], [1], [2], [3], [4], [5]],
        [[6], [7]],
    ]


def hear(shares: Shares, seconds: list[float], steps: int = 8) -> None:
    for _ in range(steps):
        shares.heard(seconds)


def test_shares_follow_speed_but_not_each_whim():
    """Eight steps decide, of which a hiccup is none; who is within five percent is left alone."""
    shares = Shares(2)
    hear(shares, [1.0, 2.0], 7)
    assert shares.speeds is None
    shares.heard([50.0, 2.0])
    assert shares.speeds == pytest.approx([4 / 3, 2 / 3])
    assert shares.slowness == pytest.approx([0.5, 2.0])
    for seconds in ([1.0, 2.08], [1.04, 2.0]):
        hear(shares, seconds)
        assert shares.speeds == pytest.approx([4 / 3, 2 / 3])
    hear(shares, [1.0, 1.0])  # it is well again
    assert shares.speeds == [1.0, 1.0]
    even = Shares(4)
    hear(even, [1.0, 1.02, 0.99, 1.04])
    assert even.speeds is None


def test_shares_of_ranks_with_fixed_costs_settle_where_all_are_done_together():
    """A step takes a rank a second besides, whatever it has to do: the shares that follow from what is
    measured are found again and again until nobody waits."""
    shares, speeds = Shares(2), [1.0, 1.0]
    for _ in range(6):
        took = [1 + 4 * speed * cost for speed, cost in zip(speeds, (1.0, 3.0), strict=True)]
        hear(shares, [seconds / speed for seconds, speed in zip(took, speeds, strict=True)])
        speeds = shares.speeds or speeds
    assert max(took) / min(took) < 1.1


def test_a_rank_that_is_slow_for_long_is_named_until_it_is_not():
    shares = Shares(3)
    hear(shares, [1.0, 1.0, 1.5], 16)
    assert shares.stragglers == {}
    hear(shares, [1.0, 1.0, 1.5])
    assert shares.stragglers == {2: 1.5}
    hear(shares, [1.0, 1.0, 1.1])
    assert shares.stragglers == {}


def test_a_rank_without_work_is_tried_again_and_one_that_stands_still_keeps_a_little():
    shares = Shares(3)
    hear(shares, [1.0, 1.0, 1000.0])
    assert shares.speeds is not None
    assert shares.speeds[2] == pytest.approx(0.1 * shares.speeds[0])
    hear(shares, [1.0, 1.0, 0.0])
    assert shares.speeds == [1.0, 1.0, 1.0]
    hear(shares, [0.0, 0.0, 0.0])
    assert shares.speeds == [1.0, 1.0, 1.0]


def test_machines_that_differ_begin_with_their_shares_and_are_judged_by_them():
    """A slower class is no straggler, unless it is slower than it should be."""
    shares = Shares(3, [1.2, 1.2, 0.6])
    assert shares.speeds == [1.2, 1.2, 0.6]
    hear(shares, [1.0, 1.0, 2.0], 24)
    assert shares.speeds == [1.2, 1.2, 0.6]
    assert shares.slowness == [1.0, 1.0, 1.0]
    assert shares.stragglers == {}
    hear(shares, [1.0, 1.0, 4.0], 24)
    assert shares.stragglers == {2: 2.0}
    assert shares.speeds == pytest.approx([4 / 3, 4 / 3, 1 / 3])


def test_ranks_of_a_pipeline_are_compared_with_those_of_their_stage():
    """Those of the second take three times as long for other work, and one of them twice that; whoever is
    alone in a stage is no slower than anybody."""
    stages = SharesOfStages([[0, 1, 2], [3, 4, 5], [6]])
    for step in range(24):
        assert (stages.slowness == {}) == (step < 8)
        stages.heard([1.0, 1.0, 1.0, 3.0, 6.0, 3.0, 20.0])
    assert stages.slowness == {0: 1, 1: 1, 2: 1, 3: 3 / 4.5, 4: 2, 5: 3 / 4.5, 6: 1}
    assert stages.stragglers == {4: 2}
