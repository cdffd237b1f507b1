"""The tutorial does what it says: its `console` blocks are run in order, by one shell, in an empty folder.

A line that begins with `$ ` is a command (`> ` continues it), the lines below it are output that must
appear, in this order. Numbers may differ; `...` stands for anything, also for lines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
TUTORIAL = Path(__file__).resolve().parents[2] / "docs/tutorials/first-run.md"
_MARK = "@@ next command"


def _steps(text: str) -> list[tuple[str, list[str]]]:
    steps: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                steps.append((line[2:], []))
            elif line.startswith("> "):
                steps[-1] = (f"{steps[-1][0]}\n{line[2:]}", steps[-1][1])
            elif line.strip() not in ("", "..."):
                steps[-1][1].append(line)
    return steps


def _pattern(expected: str) -> str:
    """Spaces, numbers and durations (`29s`, `1m26s`) may differ."""
    anything = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
    return re.sub(r"(\\[ \t])+", r"\\s+", re.sub(r"[0-9]+(\\?[.,][0-9]+)*", r"[0-9][0-9hm.,]*", anything))


def test_the_tutorial_runs(tmp_path: Path) -> None:
    steps = _steps(TUTORIAL.read_text())
    assert steps
    script = "set -e\n" + "".join(f"echo '{_MARK}'\n{command}\n" for command, _ in steps)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MLPIPE_")}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    try:
        shell = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=env, timeout=850, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    finally:  # what goes on in the background when the shell failed
        cancel = ["mlpipe", "cancel", "second", "--store", "demo/runs", "--timeout", "20 s"]
        subprocess.run(cancel, cwd=tmp_path, env=env, timeout=60, check=False, capture_output=True)
    assert shell.returncode == 0, shell.stdout
    outputs = shell.stdout.split(f"{_MARK}\n")[1:]
    for (command, expected), output in zip(steps, outputs, strict=True):
        rest = output
        for line in expected:
            found = re.search(_pattern(line), rest)
            assert found, f"$ {command}\nexpected: {line}\nin: {output}"
            rest = rest[found.end() :]
