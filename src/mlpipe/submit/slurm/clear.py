"""Ends all that a run has in Slurm, when its driver is gone."""

from __future__ import annotations

import time
from contextlib import suppress

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import job_name, store_mark
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm.client import Job
from mlpipe.submit.slurm.jobs import task_of

_POLL_SECONDS = 1.0


def clear(store: Store, run: RunState, *, timeout_seconds: float) -> None:
    """Waits until its jobs have ended: they save before. Those of a run of another store that has the same id
    are not its own. Raises SubmitError when `timeout_seconds` are over,
    after killing what is left."""
    deadline = time.monotonic() + timeout_seconds
    asked: set[tuple[str, str]] = set()
    marks = _marks(store, run)
    while alive := [job for job in _jobs(run, marks) if not job.has_ended]:
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


def _marks(store: Store, run: RunState) -> tuple[str, ...]:
    """Of the store, also as the drivers spelled it that submitted what runs."""
    urls = {store.url}
    for name, stage in run.stages.items():
        key = f"{run.attempt_key(name)}/plan.json"
        if stage.state == "running" and store.exists(key):
            with suppress(ValueError):  # of another version
                urls.add(Plan.from_json(store.get(key)).store_url)
    return tuple(map(store_mark, urls))


def _jobs(run: RunState, marks: tuple[str, ...]) -> list[Job]:
    """What an mlpipe submitted whose comments named no store counts as the run's own."""
    jobs = client.jobs(job_name(run.run_id))
    own = [job for job in jobs if job.comment.startswith(marks) or job.comment.count(":") == 1]
    return own + task_of(run.meta.get("batch"))
