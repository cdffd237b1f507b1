"""A user's own model in numbers: our own Llama given as one gets the figures that the formulas have."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.plans import CONFIG as TINY
from torch import nn

from mlpipe._core.errors import TrainError
from mlpipe.cli.plan_trace import traced
from mlpipe.plan.build import Start, build_plan, stage_hardware
from mlpipe.plan.cut_stages import cut_of
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.settings import CHECKPOINTING
from mlpipe.plan.shapes.dense import Dense
from mlpipe.plan.shapes.shape import StepShape
from mlpipe.plan.shapes.traced import Traced
from mlpipe.plan.tensors import COMPUTE_BYTES, total
from mlpipe.plan.training import compare, trainings
from mlpipe.plan.work import TrainPlan
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


def _never(*_: Any, **__: Any) -> Any:
    raise OSError("nobody is asked")


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
    assert found.parameters._replace(tensors=mine.tensors) == mine
    # the convention counts the vectors of the norms as if they were matrices
    assert found.num_flops_per_token == pytest.approx(Dense(CONFIG).flops_per_token(64), rel=0.01)
    for precision, width in COMPUTE_BYTES.items():
        for mode in CHECKPOINTING:
            step = StepShape(64, 1, 1, precision, mode, compiled=False)
            formula, logits = Dense(CONFIG).activations(step, "cpu"), 2 * width * 64 * CONFIG.vocab_size
            told = total(formula.saved) + max(logits, total(formula.rebuilt) + formula.backward_bytes)
            assert found.one(precision, mode).sample_bytes == pytest.approx(told, rel=0.01), (precision, mode)
            kept = total(formula.saved) + logits / 2  # of the logits their gradient, which the loss computes
            assert found.one(precision, mode).kept_bytes == pytest.approx(kept, rel=0.01), (precision, mode)
    # with these figures it is planned like any other
    compared = [c for c in compare(pipeline, "train", where, traced=found) if c.mesh]
    assert compared
    assert all(c.memory is not None for c in compared)
    monkeypatch.setattr(subprocess, "run", _never)
    assert traced(plan) == found  # out of the cache
    source.write_text(source.read_text() + "# changed\n")
    with pytest.raises(OSError, match="nobody is asked"):
        traced(plan)


class Peeks(nn.Module):
    """As nn.TransformerEncoder does of its mask; unless it is `blind`."""

    def __init__(self, blind: bool) -> None:
        super().__init__()
        self.blind = blind
        self.embed = nn.Embedding(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.embed(inputs)
        return logits if self.blind or bool((inputs < 8).all()) else logits[:0]


def test_a_model_that_reads_values_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is found to be what it is without; a large one is refused."""
    data = DataPlan("/data/tokens", None, None)

    def found(blind: bool) -> Traced:
        return trace(ModelPlan(Entry(f"{__name__}:Peeks", {"blind": blind}), None, 4, ()), data)

    peeking, blind = found(False), found(True)
    assert peeking.parameters == blind.parameters
    assert {key: one.sample_bytes for key, one in peeking.passes.items()} == {
        key: one.sample_bytes for key, one in blind.passes.items()
    }
    monkeypatch.setattr("mlpipe.train.trace._MOST_PARAMETERS", 63)
    with pytest.raises(TrainError, match="cannot be traced") as caught:
        found(False)
    assert "plan without --trace" in str(caught.value.hint)


_CUT = """
version: 1
name: own
stages:
  - name: train
    train:
      model: {entry: "kit.models:InitializedSequence", args: {num_blocks: 3}, seq_len: 32}
      data: {tokens: "/data/tokens", batch_size: 16, micro_batch: 2}
      steps: 10
      precision: fp32
      activation_checkpointing: none
      mesh: {pp: 2}
      pipeline: {schedule: SCHEDULE, cut: [CUT]}
    resources: {workers_per_node: 2, cpus: 2, memory: 8 GiB}
"""


@pytest.mark.parametrize(
    ("schedule", "cut", "even"),
    [
        # the head has as many FLOPs as a block, and what looks up an embedding none
        ("1f1b", "blocks.1", ("blocks.2",)),
        ("1f1b", "", None),
        ("interleaved", "blocks.0, blocks.1, norm", ("blocks.1", "blocks.2", "norm")),
    ],
)
def test_ranks_of_a_model_that_is_cut(schedule: str, cut: str, even: tuple[str, ...] | None) -> None:
    """Each has what its stages have, and all ranks what the whole has; the more even cut is named."""
    pipeline = load_pipeline_text(
        _CUT.replace("SCHEDULE", schedule).replace("[CUT]", f"[{cut}]" if cut else "auto"), "own.yaml"
    )
    where, spec = stage_hardware(pipeline, "train"), trainings(pipeline)["train"]
    train = build_plan(pipeline, "train", Start("r", 1, "./runs"), where).work
    assert isinstance(train, TrainPlan)
    assert train.pipeline is not None
    found = trace(train.model, train.data, train.pipeline, 2)
    assert found.cut == (tuple(cut.split(", ")) if cut else ("blocks.2",))
    ranks = found.parameters.by_rank
    assert sum(one.total for one in ranks) == found.parameters.total
    assert sum(one.num_blocks for one in ranks) == found.parameters.num_blocks == 3
    flops = {child.name: child.flops for child in found.children}
    assert flops["embed"] == flops["norm"] == 0
    assert all(flops[f"blocks.{number}"] == 2 * 32 * 2 * 32 * 128 for number in range(3))
    assert found.widths == {"stage_output": 32}
    for key, whole in found.passes.items():
        parts = [rank[key] for rank in found.of_ranks]
        for way in ("forward", "backward"):
            assert sum(getattr(one, way).matmul_flops for one in parts) == pytest.approx(
                getattr(whole, way).matmul_flops
            )
        assert max(one.sample_bytes for one in parts) < whole.sample_bytes
    chosen = next(one for one in compare(pipeline, "train", where, traced=found) if one.asked and one.mesh)
    assert chosen.memory is not None
    told = cut_of(spec, found, where, chosen)
    assert told is not None
    assert max(one.memory_bytes for one in told.ranks) == chosen.memory.total
    assert sum(one.flops_ratio for one in told.ranks) == pytest.approx(1)
    assert told.even == even
