"""The guide to fine-tuning does what it says, in an empty folder: open weights and conversations in, an
adapter out that peft loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import console, warm
from kit.guide import blocks

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
TEXT = (Path(__file__).resolve().parents[2] / "docs/how-to/fine-tune.md").read_text()


def test_the_guide_runs(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    for path, text in (blocks(TEXT, "python") | blocks(TEXT, "yaml")).items():
        (tmp_path / path).write_text(text)
    console.run(TEXT, tmp_path, warm.programs(tmp_path / "bin"), 850)
    lines = (tmp_path / "runs/runs/first/stages/tune/attempt-1/records/rank-0.jsonl").read_text().splitlines()
    samples = [one["sample"] for one in map(json.loads, lines) if one["kind"] == "validation"]
    assert len(samples) == 3
    assert samples[-1].startswith("What is 2 plus 3?\n2 plus")
