"""An elastic training on Slurm: a job for the coordinator and one for each replica, followed to the end.

Each look compares the jobs that there are with how many replicas are wanted, and submits or stops what
differs; what jobs and outcomes say is all that another driver needs to go on. What befalls the node of a
replica is Slurm's to mend, which queues its job again; the others hear of it by the coordinator alone. One
that is so slow that the others do better without leaves, and is submitted anew for another node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.plan.plan import Plan, Replicas
from mlpipe.render.slurm import COORDINATOR, comment, job_name, output_file
from mlpipe.store import replicas
from mlpipe.store.base import Store
from mlpipe.store.outcome import AttemptOutcome
from mlpipe.submit import replica_outcomes
from mlpipe.submit.executor import Ended
from mlpipe.submit.handle import ThreadedHandle, ended_by
from mlpipe.submit.replica_outcomes import LeftOut
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm.client import AwayError, Job
from mlpipe.submit.slurm.jobs import (
    AWAY_SECONDS,
    FIRST_POLL_SECONDS,
    LAST_POLL_SECONDS,
    Asked,
    act,
    last_lines,
    same_script,
)
from mlpipe.submit.slurm.pending import why_waiting

_OTHERS_SECONDS = 60.0  # when one replica has done the training, for the others to end
# What Slurm ended of itself, where it does not queue again: submitted anew, so many times.
_MENDED = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "TIMEOUT")
_MOST_SUBMITS = 4
Render = Callable[[Plan, str], str]


class ReplicaJobs(ThreadedHandle):
    """The jobs of one attempt, submitted or adopted. `render`: the script of a part, which is the
    coordinator or the number of a replica."""

    def __init__(self, store: Store, plan: Plan, folder: str, render: Render) -> None:
        super().__init__(store, plan)
        assert plan.launch.replicas is not None
        self._limits: Replicas = plan.launch.replicas
        self._folder, self._prefix = folder, job_name(plan.run_id, plan.stage, plan.attempt)
        parts = [COORDINATOR, *map(str, range(self._limits.most))]
        self._scripts = {part: render(plan, part) for part in parts}
        self._submits = dict.fromkeys(parts, 0)
        self._asked: Asked = set()
        self._retired: set[str] = set()  # ids of jobs that are told to leave
        self._given_up: set[str] = set()
        self._left_out = LeftOut(store, plan.attempt_key, self._limits)
        self._num_taken = 0  # replicas that Slurm took
        self._end: Ended | None = None
        self._ends_at = float("inf")
        self._thread.start()

    def _work(self) -> Ended:
        Path(self._folder, output_file(self._plan, COORDINATOR)).parent.mkdir(parents=True, exist_ok=True)
        answered, interval = time.monotonic(), FIRST_POLL_SECONDS
        seen: object = None
        while True:
            try:
                jobs = self._jobs()
                if not (self._stopping or self._end):
                    self._tend(jobs)
                elif self._leave(jobs):
                    return self._end or self._stopped()
                now = {part: (job.id, job.state, job.restarts) for part, job in jobs.items()}
                interval = FIRST_POLL_SECONDS if now != seen else min(interval * 1.3, LAST_POLL_SECONDS)
                seen, answered = now, time.monotonic()
            except (SubmitError, StoreError) as error:
                if time.monotonic() - answered > AWAY_SECONDS:
                    raise
                self._note = error.message
                refused = isinstance(error, SubmitError) and not isinstance(error, AwayError)
                if refused and self._end is None and seen is None and not self._num_taken:
                    self._end, self._ends_at = Ended("failed", str(error), kind=error.kind), 0.0
            self.wait(FIRST_POLL_SECONDS if self._stopping or self._end else interval)

    def _jobs(self) -> dict[str, Job]:
        """By part: the one under way, else the last one. A second one under way is the child of an answer of
        sbatch that came too late, and waits for the first by its name."""
        found: dict[str, Job] = {}
        for job in client.jobs(f"{self._prefix}/"):
            part = job.name.removeprefix(f"{self._prefix}/")
            if part not in self._scripts or not same_script(job, comment(self._scripts[part])):
                continue
            before = found.get(part)
            if before is not None and not before.has_ended and not job.has_ended:
                client.cancel(job.id)
            elif before is None or before.has_ended:
                found[part] = job
        return found

    # -- while it trains ----------------------------------------------------------------------------

    def _tend(self, jobs: Mapping[str, Job]) -> None:
        """One look. What is found to be the end is left to `_leave`."""
        alive = {part for part, job in jobs.items() if not job.has_ended}
        gone = self._scripts.keys() - alive - {COORDINATOR}
        outcomes = replicas.outcomes(self._store, self._plan.attempt_key)
        found = {part: outcomes[int(part)] for part in gone if int(part) in outcomes}
        meeting = jobs.get(COORDINATOR)
        # who has done the training may end after the coordinator
        has_ended = meeting is not None and meeting.state == "COMPLETED"
        told = outcomes.values() if has_ended else found.values()
        if any(one.outcome == "done" for one in told):
            self._end = replica_outcomes.done(told)
            self._ends_at = time.monotonic() + _OTHERS_SECONDS
            return
        failed = {part for part in gone if self._has_failed(part, jobs.get(part), found.get(part))}
        self._end = self._failure(jobs, failed, len(alive - {COORDINATOR}), found)
        self._ends_at = time.monotonic()
        if self._end is None:
            if COORDINATOR not in alive:
                self._submit(COORDINATOR)
            self._scale(jobs, alive - {COORDINATOR}, gone - failed, len(failed))
            self._say(jobs, failed)

    def _has_failed(self, part: str, job: Job | None, outcome: AttemptOutcome | None) -> bool:
        """Whether it is not to come back; one that left after a step may."""
        if outcome is not None and outcome.outcome == "failed" and outcome.kind != "cancelled":
            self._given_up.add(part)
        elif job is not None and job.id not in self._retired:
            left = outcome is not None and job.state != "CANCELLED"  # which somebody did by hand
            if not (left or self._is_mended(part, job)):
                self._given_up.add(part)
        return part in self._given_up

    def _is_mended(self, part: str, job: Job) -> bool:
        """Whether it is submitted anew."""
        return job.state in _MENDED and self._submits[part] < _MOST_SUBMITS

    def _failure(
        self, jobs: Mapping[str, Job], failed: set[str], num_alive: int, found: Mapping[str, AttemptOutcome]
    ) -> Ended | None:
        """Of the whole training: what the others would come to as well, or too few that go on."""
        meeting = jobs.get(COORDINATOR)
        if meeting is not None and meeting.has_ended and not self._is_mended(COORDINATOR, meeting):
            lines = last_lines(Path(self._folder, output_file(self._plan, COORDINATOR)))
            words = f"the coordinator of the replicas ended as {meeting.state}{lines}"
            return Ended("failed", words, kind="infrastructure")
        known = [found[part] for part in failed & found.keys()]
        if not replica_outcomes.fatal(known) and (not failed or num_alive >= self._limits.fewest):
            return None
        if known:
            first = min(known, key=lambda outcome: outcome.time)
            return replica_outcomes.blame(known) or ended_by(first)
        part = min(failed, key=int)
        how = f"replica {part} ended as {jobs[part].state}" if part in jobs else f"replica {part} is gone"
        words = f"{num_alive} replicas are left, {self._limits.fewest} have to be: {how}"
        lines = last_lines(Path(self._folder, output_file(self._plan, part)))
        return Ended("failed", words + lines, kind="infrastructure")

    def _scale(self, jobs: Mapping[str, Job], alive: set[str], free: set[str], num_failed: int) -> None:
        told = replicas.wanted(self._store, self._plan.attempt_key)
        wanted = replica_outcomes.num_wanted(self._limits, told, num_failed)
        self._slow_ones_leave({int(part): jobs[part] for part in alive})
        staying = sorted((part for part in alive if jobs[part].id not in self._retired), key=int)
        for part in staying[wanted:]:
            self._retired.add(jobs[part].id)
        for part in alive:
            act(jobs[part], self._asked, stopping=jobs[part].id in self._retired)
        if COORDINATOR in jobs:
            act(jobs[COORDINATOR], self._asked)
        for part in sorted(free, key=int)[: max(0, wanted - len(staying))]:
            self._submit(part)

    def _slow_ones_leave(self, alive: Mapping[int, Job]) -> None:
        """One at a time."""
        running = {number: job for number, job in alive.items() if job.state == "RUNNING"}
        nodes = {number: job.nodes for number, job in running.items() if job.id not in self._retired}
        if (number := self._left_out.look(nodes)) is not None:
            self._retired.add(running[number].id)

    def _submit(self, part: str) -> None:
        """Raises AwayError when nobody knows whether it was taken: the next look shows it."""
        self._submits[part] += 1
        avoid = () if part == COORDINATOR else self._left_out.nodes
        client.submit(self._scripts[part], self._folder, avoid=avoid)
        self._num_taken += part != COORDINATOR

    def _say(self, jobs: Mapping[str, Job], failed: set[str]) -> None:
        waiting = [why_waiting(job.id, job.state, job.reason) for job in jobs.values() if not job.has_ended]
        self._note = next(filter(None, waiting), self._left_out.note())
        if failed:
            self._note = f"replica {', '.join(sorted(failed, key=int))} is given up, the others go on"

    # -- its end ------------------------------------------------------------------------------------

    def _leave(self, jobs: Mapping[str, Job]) -> bool:
        """Replicas first: they save, and meet at the coordinator to do so. Whether all have ended."""
        alive = {part: job for part, job in jobs.items() if not job.has_ended and job.state != "COMPLETING"}
        others = [job for part, job in alive.items() if part != COORDINATOR]
        late = self._stopping or time.monotonic() > self._ends_at
        for job in others:
            act(job, self._asked, stopping=late or job.state != "RUNNING", killing=self._killing)
        if not others and COORDINATOR in alive:
            act(alive[COORDINATOR], self._asked, stopping=True, killing=self._killing)
        return not alive

    def _stopped(self) -> Ended:
        return replica_outcomes.saved(replicas.outcomes(self._store, self._plan.attempt_key).values())
