"""Each stage has one phase, and no phase needs a later one."""

from __future__ import annotations

import pytest
from kit.rendered import pipeline_of

from mlpipe.plan.phases import PHASES, stages_of
from mlpipe.spec.load import load_pipeline_text

pytestmark = pytest.mark.unit

COMMANDS = """
version: 1
name: odd
stages:
  - {name: publish, needs: [promote, notes], command: [x]}
  - {name: notes, command: [x]}
  - {name: table, needs: [evaluate], command: [x]}
  - {name: promote, needs: [evaluate], promote: {as: m}}
  - {name: evaluate, needs: [train], evaluate: {}}
  - {name: train, needs: [corpus], train: {model: {preset: llama-1m, seq_len: 32}, data: {tokens: t,
     batch_size: 1}, steps: 1, strategy: single, checkpoint: {every: 1 steps}}}
  - {name: corpus, command: [x]}
"""


def test_commands_belong_to_what_they_need() -> None:
    pipeline = load_pipeline_text(COMMANDS, "odd.yaml")
    found = [stages_of(pipeline, phase) for phase in PHASES]
    assert [sorted(names) for names in found] == [
        ["corpus", "notes", "train"],
        ["evaluate", "table"],
        ["promote", "publish"],
    ]
    order = [name for names in found for name in names]
    for stage in pipeline.stages:
        assert all(order.index(need) < order.index(stage.name) for need in stage.needs)


def test_a_shipped_pipeline() -> None:
    found = [stages_of(pipeline_of("llm"), phase) for phase in PHASES]
    assert found == [["corpus", "train"], ["evaluate"], ["promote"]]
