"""The examples of docs/how-to/kubernetes.md load and render."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.rendered import plan_of

from mlpipe._core.yaml import documents
from mlpipe.render.kubernetes import stage_objects
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.unit
PAGE = Path(__file__).resolve().parents[3] / "docs/how-to/kubernetes.md"
EXAMPLES = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
TRAIN = "{model: {preset: llama-1m, seq_len: 8}, data: {tokens: x, batch_size: 2}, steps: 1}"
STAGES = f"stages: [{{name: train, train: {TRAIN}, resources: {{nodes: 2}}}}]\n"


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_examples_render(number: int) -> None:
    text = EXAMPLES[number].replace("@sha256:...", "@sha256:" + "0" * 64)
    for line in ("version: 1\n", "name: a\n", "image: a\n", "store: s3://bucket/a\n"):
        key = line.split(":")[0]
        text = text if re.search(f"^{key}:", text, flags=re.M) else line + text
    objects = stage_objects(plan_of(load_pipeline_text(text + STAGES, PAGE.name), "train"))
    assert "JobSet" in {found["kind"] for found in objects}
    if "patches" in text:
        assert "NCCL_IB_HCA" in documents(objects)
        assert objects[-1]["metadata"]["labels"]["cost-centre"] == "42"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2
