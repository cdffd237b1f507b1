"""The tutorial does what it says, in an empty folder."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from kit import console, warm

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/first-run.md"


def test_the_tutorial_runs(tmp_path: Path) -> None:
    """Of new interpreters: test_python_tutorial.py."""
    env = warm.programs(tmp_path / "bin")
    try:
        console.run(TUTORIAL.read_text(), tmp_path, env, 850)
    finally:  # what goes on in the background when the shell failed
        cancel = ["mlpipe", "cancel", "second", "--store", "demo/runs", "--timeout", "20 s"]
        subprocess.run(cancel, cwd=tmp_path, env=env, timeout=300, check=False, capture_output=True)
