"""Every committed result of a benchmark has the same keys, and claims no goal that it missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.measure import reaches

pytestmark = pytest.mark.unit

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
KEYS = {"work", "figure", "unit", "higher_is_better", "ours", "ours_spread", "peer", "best_peer"}
KEYS |= {"best_peer_spread", "ratio", "goal", "met"}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_result_has_figures_and_says_where_they_come_from(path):
    body = json.loads(path.read_text())
    assert body["commit"]
    assert {"time", "versions", "machine"} <= body.keys()
    assert body["figures"]
    for row in body["figures"]:
        assert row.keys() >= KEYS, row
        if row["goal"] is None:
            assert row["met"] is None
            continue
        if row["goal"] == 0:  # of a count: that never happens, to which there is no ratio
            assert row["met"] is (row["ours"] == 0), row
            continue
        if row["ratio"] is None:  # there was nothing to compare: then it says why, and claims nothing
            assert row["met"] is False
            assert row["reason"]
            continue
        interval, higher = row.get("ratio_interval"), row["higher_is_better"]
        assert row["met"] == reaches(row["goal"], row["ratio"], interval, higher_is_better=higher), row


@pytest.mark.parametrize(
    ("middle", "interval", "higher_is_better", "met"),
    [
        (1.0, (0.971, 1.2), True, True),
        (1.2, (0.969, 1.5), True, False),  # it may as well be slower
        (0.99, (0.98, 1.1), True, False),  # the better end alone does not count
        (1.0, None, True, True),
        (1.0, (0.8, 1.029), False, True),
        (0.9, (0.8, 1.031), False, False),
        (1.01, (0.9, 1.02), False, False),
    ],
)
def test_a_goal_is_met_by_the_median_and_nearly_by_the_worse_end(middle, interval, higher_is_better, met):
    assert reaches(1.0, middle, interval, higher_is_better=higher_is_better) is met
    assert reaches(0.5, middle / 2, interval and [end / 2 for end in interval],
                   higher_is_better=higher_is_better) is met  # fmt: skip
