"""docs/how-to/model-parallelism.md: its commands print what it shows."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/how-to/model-parallelism.md").read_text()
SHOWN = re.findall(r"^```console\n\$ mlpipe (.*?)\n(.*?)^```", PAGE, flags=re.M | re.S)


def test_the_page_shows_what_is_printed() -> None:
    assert len(SHOWN) == 3
    for command, lines in SHOWN:
        argv = [sys.executable, "-m", "mlpipe.cli", *shlex.split(command)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=300)
        printed = (done.stdout + done.stderr).splitlines()
        assert [line for line in lines.splitlines() if line not in ["...", *printed]] == [], printed
