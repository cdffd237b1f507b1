"""The planner against runs that others published: arithmetic, so the errors are the same everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).parents[3]


def test_published_runs(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "benchmarks.planner", "--only", "published", "--results", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    body = json.loads((tmp_path / "planner.json").read_text())
    rows = body["published"]
    assert len(rows) >= 15
    assert all(row["source"] for row in rows)
    test = body["published_summary"]["test"]["seconds"]
    assert test["rows"] >= 15
    assert test["median"] <= 0.15
    assert body["published_summary"]["seen"]["memory"]["worst"] <= 0.10
