"""`mlpipe tune` with real trainings: trials by their plans, going on from the file, whose file it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kit import plans

from mlpipe._core.errors import PlanError
from mlpipe.api.tuning import session as tuning
from mlpipe.api.tuning.decide import Change
from mlpipe.cli.session import CliSession
from mlpipe.cli.tune import command
from mlpipe.plan.plan import Plan

pytestmark = pytest.mark.torch
PIPELINE = """
version: 1
name: tuned
store: ./runs
stages:
  - name: train
    train:
      model: {{preset: llama-1m, seq_len: 32}}
      data: {{tokens: {tokens}, batch_size: 2}}
      steps: 1000
      checkpoint: {{every: 1 steps}}
      track: [tensorboard]
    resources: {{workers_per_node: 1, cpus: 1}}
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE.format(tokens=plans.write_tokens(tmp_path / "tokens")))
    return path


def tune(spec: Path, *arguments: str) -> Result:
    argv = [str(spec), "--steps", "6", "--time", "1 h", *arguments]
    return CliRunner().invoke(command, argv, obj=CliSession(), catch_exceptions=False)


def test_trials_are_trainings_that_are_remembered(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One change that can run, and one that cannot."""
    key = "stages.train.train"
    full = Change("recomputation", (f"{key}.activation_checkpointing=full",))
    changes = [full, Change("nonsense", (f"{key}.model.seq_len=100000",))]
    monkeypatch.setattr(tuning, "possible_changes", lambda *_: changes)
    done = tune(spec)
    assert done.exit_code == 0, done.output
    found = json.loads(Path("tune.json").read_bytes())
    assert found["sets"] in ([], list(full.sets))
    assert found["is_complete"]
    tried = {tuple(trial["sets"]): trial["seconds"] for trial in found["trials"]}
    assert tried[()] > 0
    assert tried[full.sets] > 0
    assert tried[changes[1].sets] is None
    assert "does not run" in done.stdout
    store = next((spec.parent / "cache" / "tune").iterdir())
    assert not list(store.rglob("MANIFEST.json")), "no checkpoint is left"
    modes = [
        Plan.from_json(path.read_bytes()).work.training.activation_checkpointing
        for path in sorted(store.glob("runs/tune/stages/train/attempt-*/plan.json"))
    ]
    assert modes[:3] == ["none", "full", "none"], "each by the plan that it says"
    assert not list(spec.parent.rglob("*tfevents*")), "and no tracker was told"
    again = tune(spec)
    assert "going on after" in again.stderr
    assert json.loads(Path("tune.json").read_bytes()) == found, "without another trial"
    before: dict[str, Any] = found | {"is_complete": False, "trials": found["trials"][:1]}
    Path("tune.json").write_text(json.dumps(before))
    with pytest.raises(PlanError, match="of another training"):
        tune(spec, "--set", "train.data.batch_size=4")
