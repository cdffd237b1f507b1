"""Starts a driver that outlives the terminal: `mlpipe resume RUN` in a session of its own."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.errors import KINDS_BY_CODE, SubmitError
from mlpipe.store import leases, outputs, runs
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_START_SECONDS = 60.0
_TAIL_BYTES = 8192
_CLOCKS_SECONDS = 60.0  # by which that of a file server may be behind
_OF_A_STAGE = (environment.DRIVER, environment.RUN_ID, environment.STAGE, environment.OUTPUT)
_OF_A_TERMINAL = (environment.DEBUG_RANK,)
_OF_A_STEP = ("JENKINS_SERVER_COOKIE",)  # Jenkins ends what carries it with the step, which only follows
_NOT_OURS = _OF_A_STAGE + _OF_A_TERMINAL + _OF_A_STEP


def working_folder(run: RunState) -> str:
    """Where the run was asked for, which is where its commands run, whoever drives it."""
    folder = str(run.meta.get("folder", "."))
    if not os.path.isdir(folder):
        raise SubmitError(
            f"the run was started in {folder}, which is not there (any more)",
            hint="make the folder again, or start a new run",
            kind="input",
        )
    return folder


def driver_argv(store_url: str, run_id: str, only: str | None = None, *, seen: int = 1) -> list[str]:
    """What is started, and what `--dry-run` prints. `seen`: the transition of the run that it is for; that of
    a new one is the first."""
    argv = [sys.executable, "-P", "-m", "mlpipe.cli", "resume", run_id, "--store", store_url, "--debug"]
    argv += ["--seen", str(seen)]
    return [*argv, "--stage", only, "--here"] if only else argv


def driver_log(store: Store, run_id: str) -> Path:
    """In the run's folder; for a store that is no folder, in this machine's cache."""
    folder = store.local_path(f"runs/{run_id}")
    return (folder or outputs.cache_folder() / "drivers" / run_id) / "driver.log"


def last_words(store: Store, run: RunState) -> str:
    """Of its driver that has ended: the error that its log ends with, or that nothing could be written there;
    "" of other ends, and where it wrote none."""
    log = driver_log(store, run.run_id)
    try:
        # others may write into a store: neither through a link nor out of a pipe
        descriptor = os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            is_of_one_before = about.st_mtime < run.updated - _CLOCKS_SECONDS
            if is_of_one_before or not stat.S_ISREG(about.st_mode):
                return ""
            file.seek(max(0, about.st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        is_full = _is_full(log.parent)
    except OSError:
        return ""
    _, error, words = text.rpartition("error: ")
    if error and all(line.startswith(" ") for line in words.splitlines()[1:]):  # with its hint
        return words.strip()
    return f"no space, or no quota, is left on the disk of {store.url}" if is_full else ""


def _is_full(folder: Path) -> bool:
    """For this user, whose quota may be used up though the disk has room."""
    import tempfile  # of drivers that have ended

    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            is_full = file.write(bytes(_TAIL_BYTES)) < _TAIL_BYTES  # what there was room for
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_full


def _open_log(path: Path) -> int:
    """Not through a link: others may write into a store, and would choose a file of ours."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise SubmitError(f"cannot be written: {error.strerror}", where=str(path)) from None


def detach_unless_driven(store: Store, run_id: str) -> None:
    """`detach`, of a run or sweep that another process may be driving."""
    if not leases.is_driven(store, runs.read_run(store, run_id)):
        detach(store, run_id)


def detach(store: Store, run_id: str, only: str | None = None) -> None:
    """Returns when the driver has taken the run. Raises SubmitError with its last words if it has not."""
    run = runs.read_run(store, run_id, known=True)
    seen = run.seq
    log = driver_log(store, run_id)
    log.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(_open_log(log), "ab") as out:
        process = subprocess.Popen(
            driver_argv(store.url, run_id, only, seen=seen),
            cwd=working_folder(run),
            env={name: value for name, value in os.environ.items() if name not in _NOT_OURS},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    deadline = time.monotonic() + _START_SECONDS
    while True:
        code = process.poll()
        run = runs.read_run(store, run_id, known=True)
        if run.driver is not None and run.driver.pid == process.pid:
            return
        if code is not None:
            has_ended = run.state == "done" or (run.state in runs.RUN_ENDED and run.seq != seen)
            if code == 0 or has_ended or leases.is_driven(store, run):
                return  # nothing was left to do, it ended within a blink, or another driver does it
            words = last_words(store, run) or log.read_text(errors="replace").rpartition("error: ")[2].strip()
            kind = KINDS_BY_CODE.get(code)
            raise SubmitError(f"the driver ended at once: {words}", where=str(log), kind=kind)
        if time.monotonic() > deadline:
            process.terminate()
            raise SubmitError(f"the driver did not start within {_START_SECONDS:.0f} s", where=str(log))
        time.sleep(0.05)
