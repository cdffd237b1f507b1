"""The Slurm job of one attempt of one stage, followed to its end.

Its name follows from run, stage and attempt, and its comment holds the digest of its script, so that whoever
comes again (another driver, or this one after an answer of sbatch was lost) adopts what is there. What became
of a stage is read from the outcomes that its launchers left in the store: Slurm forgets a job after minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import comment, job_name, output_file
from mlpipe.store.base import Store
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import ThreadedHandle, blamed, elsewhere, ended_by, outcomes_of
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm.client import AwayError, Job
from mlpipe.submit.slurm.pending import why_waiting

FIRST_POLL_SECONDS, LAST_POLL_SECONDS = 1.0, 15.0  # a controller serves thousands: ask less and less
AWAY_SECONDS = 1800.0  # the controller may be away for this long; jobs go on without it
_GONE_POLLS = 2  # so many times a job is not listed before it is believed to be gone
_LAST_LINES = 15  # of what a job said that left no outcome
_TAIL_BYTES = 8192
Asked = set[tuple[str, int, str]]  # what each start of a job was told already


Task = Mapping[str, str]  # of an array: `job` (its id, 12_3), `name` and `comment` of all, `output`


class JobHandle(ThreadedHandle):
    """One attempt's job, submitted or adopted. `task`: that it is already; a job of its own is submitted
    where Slurm does not know that one any more."""

    def __init__(self, store: Store, plan: Plan, folder: str, script: str, task: Task | None = None) -> None:
        super().__init__(store, plan)
        self._folder, self._script, self._task = folder, script, task
        self._name, self._comment = job_name(plan.run_id, plan.stage, plan.attempt), comment(script)
        self._output = Path(folder, task["output"] if task else output_file(plan))
        self._thread.start()

    def _work(self) -> Ended:
        if not self._submit():
            return Ended("cancelled", "stopped before it was submitted")
        return self._follow_job()

    def _submit(self) -> bool:
        """Unless it is there, or was and has left an outcome. After a lost answer it is looked for first: no
        second one is submitted beside one that is known. False: the stage was asked to stop meanwhile."""
        began = time.monotonic()
        while True:
            try:
                if self._jobs() or outcomes_of(self._store, self._plan):
                    return True
                if self._stopping:
                    return False
                self._output = Path(self._folder, output_file(self._plan))
                self._output.parent.mkdir(parents=True, exist_ok=True)
                client.submit(self._script, self._folder)
                return True
            except AwayError as error:
                if time.monotonic() - began > AWAY_SECONDS:
                    raise
                self._note = error.message
                self.wait(FIRST_POLL_SECONDS)

    def _jobs(self) -> list[Job]:
        """Of this attempt. Raises SubmitError (input) for one of the same name that is another."""
        jobs = [job for job in client.jobs(self._name) if job.name == self._name]
        return [job for job in jobs if same_script(job, self._comment)] or task_of(self._task)

    def _follow_job(self) -> Ended:
        answered = time.monotonic()
        interval, missing = FIRST_POLL_SECONDS, 0
        seen: tuple[str, int] | None = None
        asked: Asked = set()
        while True:
            try:
                job = self._one(self._jobs())
                missing = 0 if job is not None else missing + 1
                if job is None and missing >= _GONE_POLLS:
                    return self._result_of_gone()
                if job is not None:
                    if job.has_ended:
                        return self._result(job)
                    changed = (job.state, job.restarts) != seen
                    seen = (job.state, job.restarts)
                    interval = FIRST_POLL_SECONDS if changed else min(interval * 1.3, LAST_POLL_SECONDS)
                    self._note = why_waiting(job.id, job.state, job.reason) or _restarted(job)
                    act(job, asked, stopping=self._stopping, killing=self._killing)
                answered = time.monotonic()
            except SubmitError as error:  # of any words: what Slurm fails to say does not end a job
                if time.monotonic() - answered > AWAY_SECONDS:
                    raise
                self._note = error.message
            self.wait(FIRST_POLL_SECONDS if self._stopping or missing else interval)

    def _one(self, jobs: list[Job]) -> Job | None:
        """The first of those under way; a second one is the child of an answer that came too late, and has
        not begun: by its name it waits for the first."""
        alive = [job for job in jobs if not job.has_ended]
        for twin in alive[1:]:
            client.cancel(twin.id)
        return alive[0] if alive else (jobs[0] if jobs else None)

    def _result(self, job: Job) -> Ended:
        outcomes = outcomes_of(self._store, self._plan)
        done = [outcome for outcome in outcomes if outcome.outcome == "done"]
        if job.state == "COMPLETED" and done:
            return ended_by(done[0])
        if (again := elsewhere(self._plan, outcomes)) is not None:
            return again
        if (culprit := blamed(outcomes)) is not None:
            return ended_by(culprit)
        if job.state == "OUT_OF_MEMORY":
            words = f"Slurm job {job.id} took more memory than it had; ask for more: resources.memory"
            return Ended("failed", words, kind="infrastructure", exit_code=job.exit_code)
        if job.state in ("TIMEOUT", "DEADLINE"):
            words = f"Slurm job {job.id} reached its time limit and could not save and queue again before"
            return Ended("failed", words, kind="infrastructure")
        # a command that was stopped was stopped for a node that left no outcome, unless somebody asked for it
        asked = self._stopping or job.state == "CANCELLED"
        outcomes = [one for one in outcomes if asked or one.kind != "cancelled"]
        saved = [one for one in outcomes if one.outcome == "saved" or one.kind == "cancelled"]
        if saved:
            return ended_by(saved[0])
        if self._stopping:
            return Ended("cancelled", "stopped before a checkpoint could be saved")
        if job.state == "CANCELLED":
            return Ended(
                "cancelled", f"somebody cancelled Slurm job {job.id} before a checkpoint could be saved"
            )
        return self._failure(job, outcomes)

    def _failure(self, job: Job, outcomes: list[AttemptOutcome]) -> Ended:
        if outcomes:
            return ended_by(min(outcomes, key=lambda outcome: outcome.time))
        how = {"NODE_FAIL": "lost a node", "BOOT_FAIL": "got nodes that did not start"}.get(
            job.state, f"ended as {job.state} with exit code {job.exit_code}"
        )
        how += f" ({job.reason})" if job.reason not in ("", "None") else ""
        return Ended(
            "failed",
            f"Slurm job {job.id} {how}{last_lines(self._output)}",
            kind="infrastructure",
            exit_code=job.exit_code,
        )

    def _result_of_gone(self) -> Ended:
        outcomes = outcomes_of(self._store, self._plan)
        if (again := elsewhere(self._plan, outcomes)) is not None:
            return again
        if (culprit := blamed(outcomes)) is not None:
            return ended_by(culprit)
        if outcomes:
            return ended_by(outcomes[0])
        if self._stopping:
            return Ended("cancelled", "stopped before a checkpoint could be saved")
        words = f"Slurm knows no job {self._name} any more, and it left no outcome{last_lines(self._output)}"
        return Ended("failed", words, kind="infrastructure")


def act(job: Job, asked: Asked, *, stopping: bool = False, killing: bool = False) -> None:
    """What is asked of the job, once for each of its starts; again where no answer came."""

    def once(what: str, do: Callable[[str], None]) -> None:
        if (job.id, job.restarts, what) not in asked:
            do(job.id)
            asked.add((job.id, job.restarts, what))

    if killing:
        once("kill", client.kill)
    elif stopping:
        if job.state == "RUNNING":
            once("stop", lambda number: client.signal(number, "USR2"))
        elif job.state != "COMPLETING":
            once("cancel", client.cancel)
    elif job.state == "PENDING" and job.reason == "BeginTime" and job.restarts:
        # Where it starts in the second in which its last start ended, slurmd takes its credential for the one
        # that was revoked then, and Slurm ends it as FAILED: so one look, FIRST_POLL_SECONDS at least, later.
        if (seen := (job.id, job.restarts, "waits")) in asked:
            once("start", client.start_now)
        asked.add(seen)


def task_of(task: Task | None) -> list[Job]:
    """As squeue tells of it, if it does."""
    if task is None:
        return []
    jobs = client.jobs(task["name"])
    return [job for job in jobs if job.id == task["job"] and job.comment == task["comment"]]


def same_script(job: Job, expected: str) -> bool:
    """Whether the job's comment says so. Raises SubmitError (input) for another one under way."""
    if job.comment != expected and not job.has_ended:
        raise SubmitError(
            f"another job has the name {job.name}",
            where=f"Slurm job {job.id}",
            hint="a run of this id in another store (or this one by another path), or by another version of "
            "mlpipe: scancel it, or choose another --run-id",
            kind="input",
        )
    return job.comment == expected


def last_lines(output: Path) -> str:
    """Of what a job itself said, where this machine sees it."""
    try:
        tail = output.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").splitlines()[-_LAST_LINES:]
    except OSError:
        return ""
    return "; its last lines:" + "".join(f"\n  | {line}" for line in tail) if tail else ", silently"


def _restarted(job: Job) -> str:
    if not job.restarts:
        return ""
    return f"Slurm job {job.id} was queued again " + (
        "once" if job.restarts == 1 else f"{job.restarts} times"
    )
