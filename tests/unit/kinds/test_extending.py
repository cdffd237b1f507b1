"""Of docs/how-to/extend.md: each extension is new files in one place and one line in one table; and what its
kind of stages gets of the commands that train nothing. The whole of it runs in tests/torch/test_extend.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.guide import EXTENSIONS, ROOT, copy_with, extension

pytestmark = pytest.mark.unit

PIPELINE = """\
version: 1
name: verified
image: registry.example.com/team/mlpipe@sha256:{digest}
stages:
  - name: corpus
    command: [mlpipe-corpus, --out, "{{{{output}}}}"]
  - name: train
    needs: [corpus]
    train:
      model: {{preset: llama-1m, seq_len: 32}}
      data: {{tokens: "{{{{stages.corpus.output}}}}", batch_size: 8}}
      steps: 10
  - name: check
    needs: [train]
    verify: {{train: {train}}}
"""


@pytest.mark.parametrize("title", EXTENSIONS)
def test_an_extension_is_new_files_in_one_place_and_one_line_in_one_table(title: str) -> None:
    shown = extension(title)
    assert len(shown.added) == 1
    assert len({Path(path).parent for path in shown.files}) == 1
    assert len(shown.files) == 1 or Path(next(iter(shown.files))).name == "__init__.py"
    for path in shown.files:
        assert not (ROOT / path).exists()
    assert (ROOT / shown.table).read_text().splitlines().count(shown.after) == 1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_with(["A stage kind"], tmp_path_factory.mktemp("copy"))


@pytest.fixture
def mlpipe_with(source: Path, tmp_path: Path):
    def run(*arguments: str, train: str = "train", code: int = 0) -> str:
        (tmp_path / "verified.yaml").write_text(PIPELINE.format(digest="0" * 64, train=train))
        done = subprocess.run(
            [sys.executable, "-m", "mlpipe.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(source), "MLPIPE_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_its_keys_are_checked_and_in_the_schema(mlpipe_with) -> None:
    assert "verified.yaml:15:14: 'tain' is no train stage that 'check' needs" in mlpipe_with(
        "validate", "verified.yaml", train="tain", code=2
    )
    schema = json.loads(mlpipe_with("schema"))
    assert {"required": ["verify"]} in schema["$defs"]["Stage"]["oneOf"]
    about = schema["$defs"]["Verify"]["properties"]["train"]["description"]
    assert about == "Stage whose last checkpoint it is. Default: the one it needs."


def test_it_is_planned_and_has_its_phase_and_no_objects(mlpipe_with) -> None:
    assert "check (verify)\n  the last checkpoint of train" in mlpipe_with("plan", "verified.yaml")
    text = mlpipe_with("render", "verified.yaml", "--for", "kubernetes", "--store", "s3://ml-runs/x")
    assert "# Stage check is done in the driver's own process" in text
    assert "mlpipe.dev/stage: check" not in text
    said = mlpipe_with("submit", "verified.yaml", "--phase", "evaluate", "--run-id", "r", "--wait", code=2)
    assert "evaluate: check" in said
