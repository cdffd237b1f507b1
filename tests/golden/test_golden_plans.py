"""The plans of the shipped pipelines on fixed hardware, byte for byte but for the digest of mlpipe's code.

`MLPIPE_UPDATE_GOLDEN=1` rewrites them; read the difference before committing it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.hardware import GIB, Hardware
from mlpipe.spec.load import load_pipeline

pytestmark = pytest.mark.golden
HERE = Path(__file__).parent
PIPELINES = HERE.parents[1] / "pipelines"
LAPTOP = Hardware("cpu", 1, 2, 4 * GIB, "CPU worker", {}, 2)
CLUSTER = stage_hardware(load_pipeline(PIPELINES / "llm.yaml"), "train")  # 2 x 8 H100 of the catalogue
CASES = [
    (name, hardware, stage.name)
    for name, hardware in (("quickstart", LAPTOP), ("llm", CLUSTER))
    for stage in load_pipeline(PIPELINES / f"{name}.yaml").stages
]


@pytest.mark.parametrize(("name", "hardware", "stage"), CASES, ids=[f"{c[0]}-{c[2]}" for c in CASES])
def test_plan(name: str, hardware: Hardware, stage: str) -> None:
    pipeline = load_pipeline(PIPELINES / f"{name}.yaml")
    plan = build_plan(
        pipeline,
        stage,
        Start(f"{name}-20260101-000000-0000", 1, pipeline.store),
        hardware,
    )
    text = replace(plan, code_digest="0" * 64).to_json()
    expected = HERE / "plans" / f"{name}-{stage}.json"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.write_text(text)
    assert text == expected.read_text()
