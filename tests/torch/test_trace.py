"""A user's own model in numbers: our own Llama given as one gets the figures that the formulas have."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from kit.plans import CONFIG as TINY
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe.cli.plan_trace import traced
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.plan import CHECKPOINTING, DataPlan, Entry, ModelPlan
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.tensors import COMPUTE_BYTES, total
from mlpipe.plan.training import compare
from mlpipe.spec.load import load_pipeline_text
from mlpipe.train.trace import trace

pytestmark = pytest.mark.torch
CONFIG = dataclasses.replace(TINY, vocab_size=4096)  # of several chunks of the loss, as any real one
_SPEC = """
version: 1
name: own
stages:
  - name: train
    train:
      model: {{entry: "own_llama:build", args: {args}, seq_len: 64}}
      data: {{tokens: "/data/tokens", batch_size: 16}}
      steps: 10
      strategy: auto
    resources: {{workers_per_node: 2, cpus: 2, memory: 8 GiB}}
"""


def test_our_llama_as_an_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "own_llama.py"
    source.write_text("from mlpipe.train.models.llama import build_model as build\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    pipeline = load_pipeline_text(_SPEC.format(args=json.dumps(asdict(CONFIG))), "own.yaml")
    where = stage_hardware(pipeline, "train")
    plan = build_plan(pipeline, "train", Start("r", 1, "./runs"), where)
    found = traced(plan)
    assert found is not None
    mine = Dense(CONFIG).parameters
    assert found.parameters.share(4) == mine.share(4)
    assert dataclasses.replace(found.parameters, tensors=mine.tensors) == mine
    # the convention counts the vectors of the norms as if they were matrices
    assert found.num_flops_per_token == pytest.approx(Dense(CONFIG).flops_per_token(64), rel=0.01)
    for precision, width in COMPUTE_BYTES.items():
        for mode in CHECKPOINTING:
            step = StepShape(64, 1, 1, precision, mode, compiled=False)
            formula, logits = Dense(CONFIG).activations(step, "cpu"), 2 * width * 64 * CONFIG.vocab_size
            told = total(formula.saved) + max(logits, total(formula.rebuilt) + formula.backward_bytes)
            assert found.one(precision, mode).sample_bytes == pytest.approx(told, rel=0.01), (precision, mode)
    # with these figures it is planned like any other
    assert all(c.memory is not None for c in compare(pipeline, "train", where, traced=found) if c.mesh)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert traced(plan) == found  # out of the cache
    source.write_text(source.read_text() + "# changed\n")
    with pytest.raises(OSError, match="nowhere"):
        traced(plan)


class Peeks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.embed(inputs) if inputs.sum().item() else inputs


def test_a_model_that_reads_values_is_refused() -> None:
    model = ModelPlan(Entry(f"{__name__}:Peeks", {}), None, 4, ())
    with pytest.raises(TrainError, match="cannot be traced") as caught:
        trace(model, DataPlan("/data/tokens", None, None))
    assert "plan without --trace" in str(caught.value.hint)
