"""A kind of stages is one folder and one line in the table: this one counts the words of a text file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mlpipe
from mlpipe.kinds import KINDS, Kind
from mlpipe.spec.part import spec_part

pytestmark = pytest.mark.unit

TOY = Path(__file__).parent / "count"  # the kind's folder, as docs/how-to/extend.md shows it
LINE = '        Kind("count", runs="driver", phase="evaluate"),\n'  # its line in mlpipe/kinds/__init__.py
LAST_LINE = '        Kind("promote", runs="driver", phase="promote"),\n'
PIPELINE = """\
version: 1
name: counted
image: registry.example.com/team/mlpipe@sha256:{digest}
stages:
  - name: text
    command: [python, -c, "print('three words here', file=open('{{{{output}}}}/text', 'w'))"]
  - name: words
    needs: [text]
    count: {{file: text, at_least: {at_least}}}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """mlpipe's own source with the kind: a folder more, and a line more in one file."""
    folder = tmp_path_factory.mktemp("src")
    package = Path(mlpipe.__file__).parent
    shutil.copytree(package, folder / "mlpipe", ignore=shutil.ignore_patterns("__pycache__"))
    table = folder / "mlpipe" / "kinds" / "__init__.py"
    assert table.read_text().count(LAST_LINE) == 1
    table.write_text(table.read_text().replace(LAST_LINE, LINE + LAST_LINE))
    shutil.copytree(TOY, folder / "mlpipe" / "kinds" / "count")
    return folder


@pytest.fixture
def mlpipe_with(source: Path, tmp_path: Path):
    def run(*arguments: str, at_least: int = 3, code: int = 0) -> str:
        pipeline = tmp_path / "counted.yaml"
        pipeline.write_text(PIPELINE.format(digest="0" * 64, at_least=at_least))
        done = subprocess.run(
            [sys.executable, "-m", "mlpipe.cli", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(source), "MLPIPE_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_its_keys_are_checked_and_in_the_schema(mlpipe_with) -> None:
    mlpipe_with("validate", "counted.yaml")
    assert "counted.yaml:9:35: a text has no -1 words; write 1 or more" in mlpipe_with(
        "validate", "counted.yaml", at_least=-1, code=2
    )
    schema = json.loads(mlpipe_with("schema"))
    assert {"required": ["count"]} in schema["$defs"]["Stage"]["oneOf"]
    assert (
        schema["$defs"]["Count"]["properties"]["file"]["description"] == "In the folder of the stage before."
    )


def test_it_is_planned_run_and_reported(mlpipe_with, tmp_path: Path) -> None:
    assert "words (count)\n  words of text, at least 3" in mlpipe_with("plan", "counted.yaml")
    mlpipe_with("run", "counted.yaml")
    (run,) = (tmp_path / "runs" / "runs").iterdir()
    state = json.loads((run / "run.json").read_text())["stages"]["words"]
    assert (state["state"], state["outcome"]["words"]) == ("done", 3)
    plan = json.loads((run / "stages" / "words" / "attempt-1" / "plan.json").read_text())
    assert plan["count"] == {"stage": "text", "file": "text", "at_least": 3}
    assert ">words<" in (run / "report.html").read_text()
    assert "text has 3 words, not 4" in mlpipe_with("run", "counted.yaml", at_least=4, code=3)


def test_its_phase_and_its_objects(mlpipe_with) -> None:
    argv = ("render", "counted.yaml", "--for", "kubernetes", "--store", "s3://ml-runs/x")
    text = mlpipe_with(*argv)
    assert "# Stage words is done in the driver's own process" in text
    assert "mlpipe.dev/stage: words" not in text
    said = mlpipe_with("submit", "counted.yaml", "--phase", "evaluate", "--run-id", "r", "--wait", code=2)
    assert "evaluate: words" in said


PACKAGE = Path(mlpipe.__file__).parent


@pytest.mark.parametrize("kind", KINDS.values(), ids=str)
def test_every_kind_has_its_parts(kind: Kind) -> None:
    assert kind.part("plan").PLAN.kind == kind.name
    assert spec_part(kind).description
    parts = {path.stem for path in (PACKAGE / "kinds" / kind.name).glob("*.py")} - {"__init__"}
    runs = {"workers": {"worker"}, "driver": {"driver"}, "command": set()}[kind.runs]
    assert parts == {"spec", "plan", "build", "report"} | runs
