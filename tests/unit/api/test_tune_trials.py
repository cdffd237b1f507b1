"""What `mlpipe tune` runs before its first trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlpipe.api.pipeline import load
from mlpipe.api.tuning.trials import Trials, tuning_backend
from mlpipe.store.open import open_store

pytestmark = pytest.mark.unit
PIPELINE = """
version: 1
name: t
store: ./runs
stages:
  - {name: late, needs: [early], command: [echo]}
  - {name: early, command: [echo]}
  - {name: nobody, needs: [early], command: [echo]}
  - name: train
    needs: [late, early]
    train:
      model: {preset: llama-1m, seq_len: 32}
      data: {tokens: "{{stages.late.output}}", batch_size: 2}
      steps: 10
"""


def test_what_is_needed_runs_behind_what_it_needs_itself(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(PIPELINE)
    pipeline = load(tmp_path / "p.yaml")
    backend = tuning_backend(pipeline, None)
    trials = Trials(pipeline, "train", open_store(str(tmp_path)), "", 0.0, print, backend)
    assert trials._needed() == ["early", "late"]
