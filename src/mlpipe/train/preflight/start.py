"""Starts a node's preflight and says what came of it. No torch: the launcher's part of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from mlpipe._core.errors import KINDS_BY_CODE, ErrorKind
from mlpipe.store.outcome import NODE_FAULT
from mlpipe.store.preflight import Checked, Ranked, checked_from
from mlpipe.train.outcome import Outcome
from mlpipe.train.stop import die_with_parent

DOING, LOG = "preflight-doing", "preflight.log"
_POLL_SECONDS = 0.1
_ALONE_SECONDS = 60.0
# Of a gang: for the others to come, for the checks, and for the last of them to leave.
_TOGETHER_SECONDS = 600.0 + 2 * 60.0 + 30.0


def run_preflight(
    plan_path: Path,
    scratch: Path,
    env: Mapping[str, str],
    *,
    alone: bool,
    stopped: Callable[[], bool],
) -> tuple[Checked, Ranked | None] | Outcome:
    """What was found, and who gets ranks where there are spares; or how it failed to find anything."""
    (scratch / DOING).unlink(missing_ok=True)
    argv = [sys.executable, "-P", "-m", "mlpipe.train.preflight"]
    argv += ["--plan", str(plan_path), "--scratch", str(scratch)]
    # whatever a worker may use: all is for the preflight now
    env = {name: value for name, value in env.items() if name != "OMP_NUM_THREADS"}
    with (scratch / LOG).open("wb") as log:
        process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # not a file: the disk may be what is full
            stderr=log,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    told: list[bytes] = []
    reader = threading.Thread(target=lambda: told.append(_read(process)), daemon=True)
    reader.start()
    seconds = _ALONE_SECONDS if alone else _TOGETHER_SECONDS
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline and not stopped():
        time.sleep(_POLL_SECONDS)
    late = process.poll() is None
    if late:
        process.kill()
        process.wait()
    reader.join(_POLL_SECONDS * 10)
    if stopped():
        return _failed("cancelled", "stopped in its preflight")
    if not late and process.returncode == 0 and told:
        found = json.loads(told[0])
        ranked = None if found["ranked"] is None else Ranked(**found["ranked"])
        return checked_from(found["checked"]), ranked
    doing = (scratch / DOING).read_text() if (scratch / DOING).exists() else "the start"
    doing = doing or "a point of which its disk, which is full, has no note"
    if late:
        return _failed(
            "infrastructure", f"the preflight did not end within {seconds:.0f} s: it was at {doing}"
        )
    if process.returncode < 0:
        return _failed(
            "infrastructure",
            f"the preflight was killed by {signal.Signals(-process.returncode).name} at {doing}",
            "out of memory? look at the kernel's log; postmortem/preflight*.log of the attempt is its own",
        )
    words = (scratch / LOG).read_text(errors="replace").strip().removeprefix("error: ")
    kind = KINDS_BY_CODE.get(process.returncode, "infrastructure")
    kind = "infrastructure" if kind == "bug" else kind  # the code is Python's own, too, after a traceback
    return _failed(kind, f"the preflight failed at {doing}: {words[-2000:] or process.returncode}")


def at(scratch: Path, what: str) -> None:
    """Notes what the preflight is at; a full disk, which it may be about to tell of, does not take that."""
    with suppress(OSError):
        (scratch / DOING).write_text(what)


def _read(process: subprocess.Popen[bytes]) -> bytes:
    return process.stdout.read() if process.stdout is not None else b""


def at_fault(checked: Checked) -> Outcome:
    """Of machines that did not pass."""
    return Outcome(
        "failed",
        kind="infrastructure",
        cause=NODE_FAULT,
        message="the machines did not pass the preflight: " + " | ".join(checked.words),
        hint="mend or drain what is named; or write other limits: resources.preflight",
        time=time.time(),
    )


def _failed(kind: ErrorKind, message: str, hint: str | None = None) -> Outcome:
    return Outcome("failed", kind=kind, message=message, hint=hint, time=time.time())
