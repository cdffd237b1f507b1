"""Which changes `mlpipe tune` may try."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.command_runs import Cli

from mlpipe.api.pipeline import load
from mlpipe.api.tuning.changes import KNOBS, possible_changes
from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import GPUS, Hardware
from mlpipe.plan.training import compare

pytestmark = pytest.mark.unit
H100 = GPUS["H100-80GB"]
PIPELINE = """
version: 1
name: t
store: ./runs
stages:
  - name: train
    train:
      model: {model}
      data: {{entry: "my.data:make", batch_size: 8}}
      steps: 10
      precision: bf16
      activation_checkpointing: full
      {more}
"""


def test_a_change_that_there_is_not_is_told_before_a_store_is_asked_for(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    text = PIPELINE.format(model="{preset: llama-1m, seq_len: 32}", more="")
    (cli.folder / "p.yaml").write_text(text.replace("./runs", "s3://bucket/runs") + "slurm: {}\n")
    said = cli("tune", "p.yaml", "--only", "loss,batch", code=2).stderr
    assert "Invalid value for --only: 'batch' is none of strategy, micro_batch," in said


@pytest.mark.parametrize(
    ("model", "more", "said", "unsaid"),
    [
        ("{preset: llama-1m, seq_len: 32}", "", {"loss=fused"}, {"offload=null"}),
        ("{preset: llama-1m, seq_len: 32}", "loss: fused", {"loss=null"}, {"loss=fused", "compile=model"}),
        ("{preset: llama-1m, seq_len: 32}", "offload: activations", {"offload=null"}, {"compile=block"}),
        ('{entry: "my.models:build", seq_len: 32}', "", set(), {"loss=fused", "offload=null"}),
    ],
)
def test_what_the_file_can_say_and_has_not_said(tmp_path: Path, model, more, said, unsaid) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE.format(model=model, more=more))
    pipeline = load(tmp_path / "p.yaml")
    hardware = Hardware("cuda", 1, 2, H100.memory_bytes, "H100-80GB", H100.speed.peak_flops, 16, H100.speed)
    plan = build_plan(pipeline.spec, "train", Start("t", 1, str(tmp_path)), hardware)
    changes = possible_changes(pipeline, plan, compare(pipeline.spec, "train", hardware), hardware)
    assert {change.knob for change in changes} <= {*KNOBS}, "by which --only names them"
    sets = {one.removeprefix("stages.train.train.") for change in changes for one in change.sets}
    assert said <= sets
    assert not unsaid & sets
    assert "stages.train.env.PYTORCH_ALLOC_CONF=expandable_segments:False" in sets
