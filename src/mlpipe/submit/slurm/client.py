"""Slurm's own commands, each with a deadline; of squeue, the fields that are asked for."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from mlpipe._core import environment
from mlpipe._core.errors import SubmitError
from mlpipe.submit.slurm.pending import remedy

_COMMAND_SECONDS = 60.0
_SIGNAL_SECONDS = 4.0
_AWAY = re.compile(
    r"unable to contact slurm controller|socket timed out|connection (refused|timed out|reset)|"
    r"zero bytes were transmitted|unexpected message received|connection failure|temporarily unable|"
    r"transport endpoint|slurm_receive_msg|unable to establish controller",
    re.IGNORECASE,
)
_GONE = re.compile(r"invalid job id|already completing|already finished|not found", re.IGNORECASE)
_RETRIES = "in transitional state, retrying"
_STARTS = re.compile(r"Job \d+ to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
_EXCLUDED = re.compile(r"^#SBATCH --exclude=(\S+)$", re.MULTILINE)
_FIELDS = ("arrayjobid", "state", "reason", "restartcnt", "exit_code", "nodelist", "name", "comment")
_TASK = "arraytaskid"
_ENDED = [
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
]
# They would stand above what the script says.
_OVERRIDES = ("SBATCH_", "SRUN_", "SLURM_")
_OF_A_STAGE = (environment.DRIVER, environment.RUN_ID, environment.STAGE, environment.OUTPUT)
_KEPT = ("SLURM_CONF",)


@dataclass(frozen=True)
class Job:
    """As squeue tells of it. `id`: `12`, or `12_3` of task 3 of an array. `reason`: why it waits, or what
    ended it. `restarts`: times it was requeued."""

    id: str
    state: str
    reason: str
    restarts: int
    exit_code: int
    nodes: str
    name: str
    comment: str

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED

    @property
    def numbers(self) -> list[int]:
        """Of the job and, in an array, of its task."""
        return [int(number) for number in self.id.split("_")]


class AwayError(SubmitError):
    """The controller does not answer; what was asked may have been done."""


def jobs(prefix: str) -> list[Job]:
    """The user's own whose name begins so, in the order of their ids: those under way, and those that Slurm
    still remembers. Raises SubmitError."""
    asked = ",".join(f"{field}:|" for field in (*_FIELDS, _TASK))
    text = run(["squeue", "--me", "--noheader", "--array", "--states=all", f"--Format={asked}"])
    # Of the user's other jobs a name or comment may hold anything, ends of lines included.
    parsed = [_job(line) for line in text.splitlines() if line.strip() and prefix in line]
    return sorted((job for job in parsed if job.name.startswith(prefix)), key=lambda job: job.numbers)


def _job(line: str) -> Job:
    fields = [field.strip() for field in line.split("|")]
    if len(fields) < len(_FIELDS) or not fields[0].isdigit():
        raise SubmitError(f"squeue said {line[:200]!r}", hint="is it of Slurm 20.11 or later?")
    number, state, reason, restarts, code, nodes, name, comment = fields[: len(_FIELDS)]
    task = fields[len(_FIELDS)] if len(fields) > len(_FIELDS) else ""
    number += f"_{task}" if task.isdigit() else ""
    count = int(restarts) if restarts.isdigit() else 0
    status = int(code) if code.lstrip("-").isdigit() else 0
    return Job(number, state, reason, count, status, nodes, name, comment)


def submit(script: str, folder: str, *, avoid: Sequence[str] = (), test_only: bool = False) -> str:
    """The job's id; `test_only`: "", after the controller has checked it. `avoid`: nodes besides those that
    the script excludes. Raises AwayError when nobody knows whether it was taken, else SubmitError (input)."""
    argv = ["sbatch", "--parsable", *(["--test-only"] if test_only else [])]
    if avoid:  # which stands above what the script says
        argv.append(f"--exclude={','.join([*_EXCLUDED.findall(script), *avoid])}")
    text = run(argv, stdin=script, folder=folder)
    number = text.strip().partition(";")[0]
    return "" if test_only else number


def earliest_start(script: str, folder: str) -> float | None:
    """When the controller would start the job, were it submitted now; Unix seconds. None: it does not say.
    Raises as `submit` does."""
    said = _done(["sbatch", "--parsable", "--test-only"], script, folder).stderr
    found = _STARTS.search(said)  # by this machine's clock and time zone
    return None if found is None else datetime.fromisoformat(found[1]).timestamp()


def signal(job_id: str, name: str) -> None:
    """To the job's script alone."""
    if "_" not in job_id:
        _unless_gone(["scancel", "--batch", f"--signal={name}", job_id])
        return
    # Of a task of an array of which others wait, Slurm 22.05 says that it cannot be altered now when it has
    # signalled it, and scancel would go on asking for a minute and a half.
    try:
        _unless_gone(["scancel", "--verbose", "--batch", f"--signal={name}", job_id], _SIGNAL_SECONDS)
    except AwayError as error:
        if _RETRIES not in error.message:
            raise


def cancel(*job_ids: str) -> None:
    """Also of jobs that wait. Their processes get SIGTERM, and SIGKILL a little later."""
    _unless_gone(["scancel", *job_ids])


def kill(job_id: str) -> None:
    """At once."""
    _unless_gone(["scancel", "--full", "--signal=KILL", job_id])
    cancel(job_id)


def start_now(job_id: str) -> None:
    """Slurm lets a job that was requeued wait for two minutes."""
    run(["scontrol", "update", f"JobId={job_id}", "StartTime=now"])


def _unless_gone(argv: Sequence[str], seconds: float = _COMMAND_SECONDS) -> None:
    try:
        _done(argv, "", None, seconds)
    except AwayError:
        raise
    except SubmitError as error:
        if not _GONE.search(error.message):
            raise


def run(argv: Sequence[str], *, stdin: str = "", folder: str | None = None) -> str:
    """What the command prints. Raises AwayError, or SubmitError with what it complained of."""
    return _done(argv, stdin, folder).stdout


def _done(
    argv: Sequence[str], stdin: str, folder: str | None, seconds: float = _COMMAND_SECONDS
) -> subprocess.CompletedProcess[str]:
    env = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not (name.startswith(_OVERRIDES) or name in _OF_A_STAGE)
    }
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            cwd=folder,
            env=env,
            capture_output=True,
            encoding="utf-8",  # of the plan, whatever the locale says
            errors="replace",
            timeout=seconds,
            start_new_session=True,  # Ctrl-C is ours: a job that the controller has taken must be heard of
        )
    except FileNotFoundError:
        raise SubmitError(
            f"there is no {argv[0]} here",
            hint="run mlpipe on a login node of the cluster; mlpipe doctor --for slurm looks",
            kind="input",
        ) from None
    except subprocess.TimeoutExpired as error:
        last = (error.stderr or b"").decode(errors="replace").strip().rpartition("\n")[2]
        words = f"{argv[0]} did not answer within {seconds:.0f} s"
        raise AwayError(f"{words}: {last}" if last else words) from None
    if done.returncode == 0:
        return done
    lines = [line.removeprefix(f"{argv[0]}: ").removeprefix("error: ") for line in done.stderr.splitlines()]
    words = "; ".join(line for line in lines if line.strip()) or f"exit code {done.returncode}"
    if _AWAY.search(words):
        raise AwayError(f"Slurm's controller does not answer: {words}", hint="look with scontrol ping")
    raise SubmitError(f"{argv[0]}: {words}", hint=remedy(words), kind="input")
