"""The trials of a sweep as one job array: task 3 is the first attempt of trial 003.

Slurm starts the tasks, so many at a time as the sweep says; a task that has begun, or was cancelled, gets the
driver that its trial has anyway, which adopts it. The array's name follows from the sweep, its comment is the
digest of its script: by them it is found again, by another controller or after an answer of sbatch was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlpipe._core.errors import MlpipeError, RenderError, SubmitError
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.plan import Plan
from mlpipe.render.slurm import ARRAY_FIGURE, TaskArray, array_script, comment, name_of, parts_of
from mlpipe.spec.model import Pipeline
from mlpipe.spec.trials import planned
from mlpipe.store.base import Store
from mlpipe.store.open import full_url
from mlpipe.store.runs import RunState
from mlpipe.store.sweeps import trial_name
from mlpipe.submit.batch import METHODS
from mlpipe.submit.detach import working_folder
from mlpipe.submit.planning import planner
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm.client import AwayError, Job
from mlpipe.submit.slurm.jobs import FIRST_POLL_SECONDS, LAST_POLL_SECONDS, Task
from mlpipe.submit.slurm.pending import why_waiting
from mlpipe.submit.slurm.scripts import job_of
from mlpipe.submit.submission import Preview, Rendered, Submission, refuse_sweep
from mlpipe.submit.sweeps.create import trial_submission

Note = Callable[[str], None]


def stage_of(pipeline: Pipeline) -> str | None:
    """The only one that has a job. None: there are several, of which a later one is planned by what an
    earlier one has made."""
    names = [stage.name for stage in pipeline.stages if stage.kind.runs != "driver"]
    return names[0] if len(names) == 1 else None


def script_of(
    owner: str, trials: Mapping[str, Submission], most: int, make_plan: Callable[[Submission, str], Plan]
) -> str:
    """`make_plan`: of a trial's stage. Raises RenderError for trials that are no array, with the reason."""
    plans, jobs = {}, []
    for name, trial in trials.items():
        stage = stage_of(trial.pipeline)
        if stage is None:
            raise RenderError(
                "trials are an array where one stage of them has a job, and no other",
                hint="what one of them is: --set sweep=null",
            )
        plan = make_plan(trial, stage)
        if parts_of(plan) != [""]:
            raise RenderError("an elastic training has several jobs", where=stage)
        plans[int(name)] = plan
        jobs.append(job_of(trial.pipeline, plan))
        if jobs[-1].others:
            raise RenderError(
                "a heterogeneous job, of groups of machines, is no task of an array", where=stage
            )
    return array_script(TaskArray(owner, plans, most), jobs, output_of(plan.store_url, owner))


def output_of(store_url: str, owner: str) -> str:
    """Where the words of the tasks themselves go: beside the sweep, as `output_file` has it."""
    if "://" in store_url:
        return f"slurm-{owner}-{ARRAY_FIGURE}.out"
    return f"{store_url}/runs/{owner}/logs/slurm-{ARRAY_FIGURE}.log"


def rendered(submission: Submission) -> Rendered:
    """The script that a new sweep sends. Raises SubmitError (input) for one whose trials have several."""
    sweep = submission.pipeline.sweep
    assert sweep is not None
    owner = submission.run_id or f"{submission.pipeline.name[:34]}-{submission.pipeline.digest[:8]}"
    submission = replace(submission, store_url=full_url(submission.store_url))
    names = {trial_name(number): values for number, values in enumerate(planned(sweep))}
    if sweep.method not in METHODS or len(names) < 2 or submission.stage is not None:
        refuse_sweep(submission, "scripts")
    trials = {name: trial_submission(submission, owner, name, values) for name, values in names.items()}

    def ahead(trial: Submission, stage: str) -> Plan:
        return plan_ahead(trial.pipeline, stage, trial.store_url, trial.run_id or "", cluster=True)

    text = script_of(owner, trials, sweep.max_parallel, ahead)
    file = f"01-{stage_of(trials[trial_name(0)].pipeline)}.sbatch"
    return Rendered(files={file: text}, preview=Preview({"scripts": [text]}, text.rstrip("\n")))


def batch(
    store: Store,
    sweep: RunState,
    trials: Mapping[str, Submission],
    most: int,
    note: Note,
    hardware: Callable[[Pipeline, str], Hardware],
) -> ArrayBatch | None:
    """See `Backend.batch`."""

    def make_plan(trial: Submission, stage: str) -> Plan:
        return planner(store, trial.run_id or "", trial.pipeline, hardware, fetch=False)(stage, 1)

    kept, script = sweep.meta.get("batch"), None
    if len(trials) > 1:
        try:
            script = script_of(sweep.run_id, trials, most, make_plan)
        except MlpipeError as error:  # what ails a trial its driver says
            note(f"no array: {error.message}; each trial is submitted by itself")
    if script is None and kept is None:
        return None
    return ArrayBatch(sweep, store.url, script, trials, note)


class ArrayBatch:
    """`script`: of the `trials`, which nobody has begun; None where they are no array. What an earlier
    controller kept of its own is looked for first."""

    def __init__(
        self, sweep: RunState, store_url: str, script: str | None, trials: Collection[str], note: Note
    ) -> None:
        kept = {"name": "", "trials": {}, "taken": {}, **sweep.meta.get("batch", {})}
        self._name: str = kept["name"]
        self._trials: dict[str, list[str]] = dict(kept["trials"])  # by the comment of their array
        self._taken: dict[str, str] = dict(kept["taken"])  # ids of those that Slurm is known to have taken
        self._own = comment(script) if script is not None else ""
        if script is not None:
            self._name = name_of(script)
            self._trials[self._own] = list(trials)
        self._script, self._note = script, note
        self._output, self._folder = output_of(store_url, sweep.run_id), working_folder(sweep)
        self._number: str | None = None  # the array's own id, once it is known
        self._known_by = ""
        self._waiting = {name: "" for names in self._trials.values() for name in names}  # until a look
        self._missed: set[str] = set()
        self._gone: dict[str, str] = {}
        self._unwanted: set[str] = set()
        self._was_sent = self._is_over = self._is_stopping = self._is_rid = False
        self._driven = [name for name, trial in sweep.stages.items() if trial.state == "running"]
        self._was_stopped = sweep.state == "cancelled"  # and of what it took back some may be ending
        self._look_at, self._pause = 0.0, FIRST_POLL_SECONDS

    def meta(self) -> Mapping[str, Any]:
        return {"name": self._name, "trials": self._trials, "taken": self._taken}

    def waiting(self) -> Mapping[str, str]:
        if not self._is_over and time.monotonic() >= self._look_at:
            before = self._waiting
            try:
                self._look()
            except SubmitError as error:  # of any words: what Slurm fails to say begins no trial
                self._waiting = dict.fromkeys(self._waiting, error.message)
            is_new = self._waiting != before or self._missed
            self._pause = FIRST_POLL_SECONDS if is_new else min(self._pause * 1.3, LAST_POLL_SECONDS)
            self._look_at = time.monotonic() + self._pause
        return self._waiting

    def gone(self) -> Mapping[str, str]:
        return self._gone

    def trial(self, name: str) -> Task | None:
        if self._number is None or name not in self._trials[self._known_by]:
            return None
        output, job = self._output.replace(ARRAY_FIGURE, name), f"{self._number}_{int(name)}"
        return {"job": job, "name": self._name, "comment": self._known_by, "output": output}

    def take_back(self, name: str) -> None:
        if name not in self._unwanted:
            self._unwanted.add(name)
            self._look_at, self._pause = 0.0, FIRST_POLL_SECONDS

    def cancel(self, but: Collection[str]) -> bool:
        if not self._is_stopping:  # at once, however far off the next look is
            self._is_stopping, self._look_at = True, 0.0
        self._is_over = True
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + FIRST_POLL_SECONDS
            try:
                self._is_rid = self._end(but)
            except SubmitError:
                self._is_rid = False
        return self._is_rid

    def _end(self, but: Collection[str]) -> bool:
        alive = [job for job in self._jobs() if not job.has_ended and _trial(job) not in but]
        if ends := [job.id for job in alive if job.state != "COMPLETING"]:
            client.cancel(*ends)
        return not alive

    def _jobs(self) -> list[Job]:
        """Tasks of this sweep's arrays, those of the oldest one first."""
        jobs = [job for job in client.jobs(self._name) if job.name == self._name and len(job.numbers) == 2]
        return [job for job in jobs if job.comment in self._trials]

    def _look(self) -> None:
        """After a lost answer the array is looked for before another one is sent."""
        if self._was_stopped:  # its tasks were not cancelled by anybody else
            if not self._end(self._driven):
                self._waiting = dict.fromkeys(self._waiting, "tasks that its sweep took back have not ended")
                return
            self._was_stopped = False
            self._trials = {key: names for key, names in self._trials.items() if key == self._own}
            self._taken = {}
        jobs = self._jobs()
        alive = [job for job in jobs if not job.has_ended]
        if self._number is None:
            if found := alive or (jobs if self._was_sent else []):
                self._is_of(_array(found[0]), found[0].comment)
            elif known := [one for one in self._taken if one in self._trials]:  # all its tasks have ended
                self._is_of(self._taken[known[-1]], known[-1])
            elif self._script is None:
                self._is_over, self._waiting = True, {}
                return
            else:
                self._was_sent = True
                Path(self._folder, self._output).parent.mkdir(parents=True, exist_ok=True)
                self._send(self._script)
                return
        # a second one is the child of an answer that came too late, and waits for the first by its name
        if twins := {_array(job) for job in alive} - {self._number}:
            client.cancel(*sorted(twins))
        tasks = {_trial(job): job for job in jobs if _array(job) == self._number}
        # one that is cancelled before it began is listed no more
        missing = self._waiting.keys() - tasks.keys()
        for name in missing & self._missed:
            self._gone[name] = f"somebody cancelled Slurm job {self._number}_{int(name)} before it began"
        self._missed = missing - self._gone.keys()
        self._waiting = dict.fromkeys(sorted(self._missed), "") | {
            name: why_waiting(job.id, job.state, job.reason)
            for name, job in tasks.items()
            if job.state == "PENDING" and not job.restarts
        }
        self._is_over = not self._waiting
        if ends := [tasks[name].id for name in self._unwanted & self._waiting.keys() & tasks.keys()]:
            client.cancel(*sorted(ends))

    def _is_of(self, number: str, known_by: str) -> None:
        self._number, self._known_by = number, known_by
        self._taken = {key: one for key, one in self._taken.items() if key != known_by} | {known_by: number}
        self._waiting = dict.fromkeys(self._trials[known_by], "")

    def _send(self, script: str) -> None:
        try:
            self._is_of(client.submit(script, self._folder), comment(script))
        except AwayError:
            raise
        except SubmitError as error:  # too many for the account, no arrays at all
            self._is_over, self._waiting = True, {}
            self._note(f"no array: {error.message}; each trial is submitted by itself")


def _array(job: Job) -> str:
    """The id of the array that it is a task of."""
    return job.id.partition("_")[0]


def _trial(job: Job) -> str:
    return trial_name(job.numbers[1])
