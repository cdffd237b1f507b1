"""What the launcher says of a preflight that did not come to an end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mlpipe.train.preflight.start import run_preflight

pytestmark = pytest.mark.unit


def ended(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str):
    """Of a program in Python's place, whose sixth argument is the scratch folder."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return run_preflight(folder / "plan.json", folder, os.environ, alone=True, stopped=lambda: False)


def test_one_that_was_killed_is_said_to_be_by_which_signal_where_and_perhaps_why(tmp_path, monkeypatch):
    outcome = ended(tmp_path, monkeypatch, 'printf "a matmul" > $7/preflight-doing; kill -9 $$')
    assert (outcome.kind, outcome.message) == (
        "infrastructure",
        "the preflight was killed by SIGKILL at a matmul",
    )
    assert outcome.hint.startswith("out of memory? ")
    assert "postmortem/preflight*.log" in outcome.hint


def test_one_that_failed_is_told_in_its_own_words(tmp_path, monkeypatch):
    outcome = ended(tmp_path, monkeypatch, 'echo "error: the store is gone" >&2; exit 4')
    assert (outcome.kind, outcome.message) == (
        "infrastructure",
        "the preflight failed at the start: the store is gone",
    )


def test_one_whose_disk_took_no_note_is_told_so(tmp_path, monkeypatch):
    outcome = ended(tmp_path, monkeypatch, ': > $7/preflight-doing; echo "error: full" >&2; exit 4')
    assert (
        outcome.message
        == "the preflight failed at a point of which its disk, which is full, has no note: full"
    )
