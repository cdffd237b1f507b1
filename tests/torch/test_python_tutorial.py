"""The tutorial of the Python side does what it says: its blocks as one program, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/python.md"


def test_the_tutorial_runs(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLPIPE_")}
    env |= {"MLPIPE_CACHE": str(tmp_path / "cache"), "MLPIPE_CALIBRATE": "off"}
    cli = [sys.executable, "-m", "mlpipe.cli"]
    subprocess.run([*cli, "init", "demo"], cwd=tmp_path, env=env, check=True, timeout=300)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S))
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
        )
    finally:
        subprocess.run(
            [*cli, "cancel", "--ignore-not-found", "second", "--store", "runs"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    said = done.stdout
    assert "['corpus', 'train', 'evaluate', 'promote']" in said
    assert "8 steps, the loss from" in said
    assert "step 8 in" in said
    assert "the least loss at step" in said  # of a frame of pandas
    assert re.search(r"train\.train\.optimizer\.lr 0\.001 0\.003", said), said
    assert "<svg" in (tmp_path / "compare.html").read_text()
    assert not (tmp_path / "runs/models").exists()  # a smoke test registers nothing
