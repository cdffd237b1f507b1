"""How many modules a command imports before it does anything: what a person waits for at every call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kit import budget

pytestmark = pytest.mark.unit

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.mark.parametrize("arguments", ["--help", "validate", "plan", "render --for kubernetes", "list"])
def test_a_command_imports_no_more_than_it_needs(tmp_path, arguments):
    words = arguments.split()
    if words[0] in ("validate", "plan", "render"):
        words.append(str(PIPELINES / "llm.yaml"))
    script = (
        "import sys\nfrom mlpipe.cli.app import run_app\n"
        f"try:\n    run_app({words})\nexcept SystemExit as ended:\n    code = ended.code\n"
        "print(len(sys.modules), file=sys.stderr)\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    budget.within("modules imported", {f"mlpipe {arguments}": int(done.stderr.split()[-1])})
