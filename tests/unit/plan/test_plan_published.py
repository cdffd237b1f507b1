"""The planner against runs that others published: arithmetic, so the errors are the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("published")
    argv = [sys.executable, "-m", "benchmarks.planner", "--only", "published", "--results", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "planner.json").read_text())
    return found


def test_rows_are_split_by_source(body: dict[str, Any]) -> None:
    rows = body["published"]
    assert len(rows) >= 100
    assert all(sum(axis in r["name"] for r in rows) >= 5 for axis in (" tp ", " pp ", " cp "))
    sets = [{r["source"].split(" ")[0] for r in rows if r["set"] == name} for name in ("learn", "test")]
    assert all(sets)
    assert not sets[0] & sets[1]


def test_rows_that_nothing_was_learned_from(body: dict[str, Any]) -> None:
    found = body["published_summary"]["test"]
    assert found["seconds"]["rows"] >= 25
    assert found["seconds"]["median"] <= 0.10
    assert abs(found["bias"]) <= 0.03


def test_rows_with_model_parallelism(body: dict[str, Any]) -> None:
    learn, test = (body["published_summary"][f"{name}, model parallelism"] for name in ("learn", "test"))
    assert learn["seconds"]["rows"] + test["seconds"]["rows"] >= 100
    assert test["seconds"]["median"] <= 0.10
    assert abs(test["bias"]) <= 0.03
    assert len(test["ranking"]) == 5
    assert min(test["ranking"].values()) >= 0.95


def test_rows_that_it_was_learned_from(body: dict[str, Any]) -> None:
    """Other trainers lose what the planner does not count, so it may be too fast, but a little."""
    found = body["published_summary"]["learn"]
    assert found["seconds"]["median"] <= 0.10
    assert -0.06 <= found["bias"] <= 0.03
    assert found["memory"]["worst"] <= 0.10


def test_the_way_predicted_to_be_fastest_is(body: dict[str, Any]) -> None:
    found = body["published_summary"]["learn"]["ranking"]
    assert len(found) >= 5
    assert min(found.values()) >= 0.95
    # beside ways without model parallelism one of the tested works misses the goal of 0.95: benchmarks/README
    tested = body["published_summary"]["test"]["ranking"]
    assert sorted(tested.values())[1] >= 0.95
    assert min(tested.values()) >= 0.90
