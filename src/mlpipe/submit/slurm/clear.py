"""Ends all that a run has in Slurm, when its driver is gone."""

from __future__ import annotations

import time

from mlpipe._core.errors import SubmitError
from mlpipe.render.slurm import job_name
from mlpipe.store.runs import RunState
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm.client import Job
from mlpipe.submit.slurm.jobs import task_of

_POLL_SECONDS = 1.0


def clear(run: RunState, *, timeout_seconds: float) -> None:
    """Waits until its jobs have ended: they save before. Raises SubmitError when `timeout_seconds` are over,
    after killing what is left."""
    deadline = time.monotonic() + timeout_seconds
    asked: set[tuple[str, str]] = set()
    while alive := [job for job in _jobs(run) if not job.has_ended]:
        late = time.monotonic() > deadline
        for job in alive:
            if late:
                client.kill(job.id)
            elif job.state != "COMPLETING" and (job.id, job.state) not in asked:
                asked.add((job.id, job.state))
                client.signal(job.id, "USR2") if job.state == "RUNNING" else client.cancel(job.id)
        if late:
            raise SubmitError(
                f"{len(alive)} jobs of run {run.run_id} were killed: no end within {timeout_seconds:.0f} s",
                where=f"Slurm job {alive[0].id}",
            )
        time.sleep(_POLL_SECONDS)


def _jobs(run: RunState) -> list[Job]:
    return client.jobs(job_name(run.run_id)) + task_of(run.meta.get("batch"))
