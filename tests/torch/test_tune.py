"""`mlpipe tune` with real trainings: trials by their plans, going on from the file, whose file it is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from kit import plans

from mlpipe._core.errors import PlanError
from mlpipe._core.serial import to_json
from mlpipe.api.tuning import session as tuning
from mlpipe.api.tuning.decide import Change, TuningResult
from mlpipe.api.tuning.session import Trial, Tuned, Tuning
from mlpipe.cli.session import CliSession
from mlpipe.cli.tune import _text, command
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
    for odd, words in [({"schema_version": 0}, "version 0"), ({"seconds": -1.0}, "a step of -1.0 s")]:
        lies = before | odd if "schema_version" in odd else before | {"trials": [{"sets": []} | odd]}
        Path("tune.json").write_text(json.dumps(lies))
        with pytest.raises(PlanError, match=words):
            tune(spec)


def test_what_cannot_be_tuned_is_refused(spec: Path) -> None:
    with pytest.raises(PlanError, match="trials cannot run on jenkins") as refused:
        tune(spec, "--to", "jenkins")
    assert refused.value.kind == "input"
    with pytest.raises(PlanError, match="no change of 'offload' is possible"):
        tune(spec, "--only", "compile,offload")
    assert not Path("tune.json").exists()


def test_the_command_at_the_end_has_what_was_asked_for_too() -> None:
    tuned = Tuned(1, "k", "train", ("stages.train.train.strategy=zero1",), 0.8, is_complete=True)
    last = (
        _text(TuningResult(), tuned, ("my file.yaml", ("train.steps=5",)), "tune.json")
        .splitlines()[-1]
        .split(" --set ")
    )
    assert last == ["  mlpipe run 'my file.yaml'", "train.steps=5", *tuned.sets]
    unfinished = replace(tuned, sets=(), is_complete=False)
    assert "nothing to gain" not in _text(TuningResult(), unfinished, ("p.yaml", ()), "tune.json")


def test_what_failed_last_is_tried_again(tmp_path: Path) -> None:
    """Its disk was full, say; a file that ended so would end every call."""
    any_: Any = None
    there = Tuning(any_, "train", 6, 1.0, tmp_path / "tune.json", CliSession(), any_)
    trials = (Trial((), 1.0), Trial(("a=1",), None), Trial((), 2.0), Trial(("a=2",), None), Trial((), None))
    there.out.write_text(to_json(Tuned(1, "key", "train", trials=trials)))
    assert there._remembered("key") == list(trials[:3])
