"""The `console` blocks of a page, run in order by one shell, must say what the page says.

A line that begins with `$ ` is a command (`> ` continues it), the lines below it are output that must
appear, in this order. Numbers may differ; `...` stands for anything, also for lines.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

_MARK = "@@ next command"


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Commands, each with the lines that it says."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", text, flags=re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.startswith("> "):
                found[-1] = (f"{found[-1][0]}\n{line[2:]}", found[-1][1])
            elif line.strip() not in ("", "..."):
                found[-1][1].append(line)
    return found


def run(text: str, folder: Path, env: Mapping[str, str], seconds: float) -> None:
    """The blocks of `text` in `folder`. Raises AssertionError where a page and its commands differ."""
    commands = steps(text)
    assert commands, "no command on the page"
    script = "set -e\n" + "".join(f"echo '{_MARK}'\n{command}\n" for command, _ in commands)
    shell = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=dict(env), timeout=seconds, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert shell.returncode == 0, shell.stdout
    outputs = shell.stdout.split(f"{_MARK}\n")[1:]
    for (command, expected), output in zip(commands, outputs, strict=True):
        rest = output
        for line in expected:
            there = re.search(_pattern(line), rest)
            assert there, f"$ {command}\nexpected: {line}\nin: {output}"
            rest = rest[there.end() :]


def _pattern(expected: str) -> str:
    """Spaces, numbers and durations (`29s`, `1m26s`) may differ."""
    anything = re.escape(expected.strip()).replace(r"\.\.\.", ".*")
    return re.sub(r"(\\[ \t])+", r"\\s+", re.sub(r"[0-9]+(\\?[.,][0-9]+)*", r"[0-9][0-9hm.,]*", anything))
