"""Every committed result of a benchmark has the same keys, and claims no goal that it missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
        if row["ratio"] is None:  # there was nothing to compare: then it says why, and claims nothing
            assert row["met"] is False
            assert row["reason"]
            continue
        low, high = row.get("ratio_interval") or (row["ratio"], row["ratio"])
        assert row["met"] == (high >= row["goal"] if row["higher_is_better"] else low <= row["goal"]), row
