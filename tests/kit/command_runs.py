"""Pipelines of command stages, and the command line as a real process: what the tests of runs are made of."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kit.warm import Popen

T = TypeVar("T")


def until(
    condition: Callable[[], T | None], what: str, seconds: float = 300.0, explain: Callable[[], str] = str
) -> T:
    """Polls until `condition()` is true, and returns it. A tenth of the time at most goes into that: those
    who are waited for need the cores. Raises AssertionError with `what` and `explain()` at the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if found := condition():
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what}\n{explain()}".rstrip())
        time.sleep(min(2.0, max(0.02, 9 * (time.monotonic() - began))))


def shell(script: str) -> list[str]:
    """argv of a stage that runs `script`; `$1` is its output folder."""
    return ["sh", "-c", script, "stage", "{{output}}"]


def write_spec(
    folder: Path,
    stages: Mapping[str, Sequence[str]],
    needs: Mapping[str, Sequence[str]] | None = None,
    **more: Mapping[str, Any],
) -> Path:
    """`stages`: name -> argv. `more`: name -> further keys of that stage. JSON is YAML enough."""
    body = [
        {
            "name": name,
            "command": list(argv),
            "needs": list((needs or {}).get(name, ())),
            **more.get(name, {}),
        }
        for name, argv in stages.items()
    ]
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps({"version": 1, "name": "test", "stages": body}, indent=1))
    return path


class Cli:
    """`mlpipe` in `folder`, with its own store and cache there."""

    def __init__(self, folder: Path, *, warm: bool = False) -> None:
        """`warm`: what it starts itself, of mlpipe, are forks too (`kit/warm.py`), and no children of it."""
        self.folder = folder
        self.store = folder / "store"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("MLPIPE_")},
            "MLPIPE_STORE": str(self.store),
            "MLPIPE_CALIBRATE": "off",
            "MLPIPE_CACHE": str(folder / "cache"),
            "XDG_STATE_HOME": str(folder / "state"),
            **({"KIT_WARM": "1"} if warm else {}),
        }

    def shorten(self, place: str, seconds: float) -> None:
        """The constant `place`, like `mlpipe.store.runs:_CLAIM_SECONDS`, in all that is started from here."""
        self.env["KIT_SHORTENED"] = json.dumps(
            {**json.loads(self.env.get("KIT_SHORTENED", "{}")), place: seconds}
        )
        self.env["PYTHONPATH"] = str(Path(__file__).with_name("shortened"))

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """What it starts itself are new interpreters, unless all is warm."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        return Popen(
            "cli",
            [sys.executable, "-m", "mlpipe.cli", *arguments],
            cwd=self.folder,
            env=self.env,
            text=True,
            **{**pipes, **options},
        )

    def processes(self) -> list[int]:
        """All that were started here, by whomever, and are still there."""
        mark, found = f"MLPIPE_STORE={self.store}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def __call__(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Runs to its end and checks the exit code (None: any)."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        if code is not None and process.returncode != code:
            raise AssertionError(f"mlpipe {' '.join(arguments)} exited {process.returncode}\n{out}\n{err}")
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *arguments: str, code: int | None = 0) -> Any:
        return json.loads(self(*arguments, "--output", "json", code=code).stdout)
