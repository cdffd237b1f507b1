"""The trials of `mlpipe tune`: short trainings, one after the other, on this machine in a store of their own,
or on a cluster in the pipeline's. A trial is an attempt of the training's stage, by the plan that its change
leads to; what the stage needs has run once, before the first."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from statistics import median
from typing import Any

from mlpipe._core.errors import MlpipeError, PlanError, SubmitError
from mlpipe._core.records import Step
from mlpipe.api.pipeline import LoadedPipeline
from mlpipe.api.signals import heard
from mlpipe.api.tuning.decide import Config, TimeOverError, sets_of
from mlpipe.observe.records import list_attempts, read_records
from mlpipe.plan.plan import Plan
from mlpipe.plan.training import trainings
from mlpipe.plan.work import TrainPlan
from mlpipe.store.base import Store
from mlpipe.store.runs import read_run
from mlpipe.submit import adopt, backends, planning, process
from mlpipe.submit.backend import Backend
from mlpipe.submit.driver import CLEAR_SECONDS, DriveOptions, drive
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.held_lease import HeldLease
from mlpipe.submit.process_executor import ProcessExecutor
from mlpipe.submit.standby import Standbys
from mlpipe.submit.submission import Console, Submission

RUN_ID = "tune"
_LOOK_SECONDS = 0.1
_END_SECONDS = 60.0  # for a trial that was killed to be gone


def tuned_stage(pipeline: LoadedPipeline, asked: str | None) -> str:
    """The stage whose training is tuned. Raises PlanError where that is not one."""
    names, where = list(trainings(pipeline.spec)), pipeline.path
    if not names:
        raise PlanError("no stage trains", where=where, hint="tune tries trainings: add a stage with train")
    if asked is not None and asked not in names:
        raise PlanError(f"there is no training {asked!r}", where=where, hint=f"there is {' or '.join(names)}")
    if asked is None and len(names) != 1:
        hint = f"--stage {' or '.join(names)}"
        raise PlanError(f"there are {len(names)} trainings", where=where, hint=hint)
    stage = asked or names[0]
    resources = pipeline.spec.stage(stage).resources
    if resources is not None and resources.replicas is not None:
        hint = "tune it with --set train.resources.nodes=1"
        raise PlanError("an elastic training cannot be tuned", where=f"stage {stage!r}", hint=hint)
    if pipeline.spec.stage(stage).groups:
        hint = "tune it on one class of machines: --set train.resources={...}"
        raise PlanError("groups of machines cannot be tuned together", where=f"stage {stage!r}", hint=hint)
    return stage


def tuning_backend(pipeline: LoadedPipeline, asked: str | None) -> Backend:
    """Where trials run: `asked`, else what the file is for. Raises PlanError where they cannot."""
    name = asked or backends.takers(pipeline.spec)[0]
    chosen = backends.load(name)
    if name != backends.DEFAULT and not chosen.outlives_driver:
        hint = f"--to {backends.DEFAULT}; what wins here need not win there"
        raise PlanError(f"trials cannot run on {name}", where=pipeline.path, hint=hint)
    return chosen.of_submission(pipeline.spec, {})


@dataclass(frozen=True)
class Trials:
    """Of the training `stage` of a pipeline that is shortened already: attempts of the run `run_id`.
    `deadline`: on the monotonic clock. `note`: takes a line before each, and what one waits for."""

    pipeline: LoadedPipeline
    stage: str
    store: Store
    folder: str
    deadline: float
    note: Callable[[str], None]
    backend: Backend
    run_id: str = RUN_ID
    standbys: Standbys | None = None  # of which trials on this machine begin

    @property
    def _driver(self) -> str:
        """By which the processes of a trial here are known, also to the next call. There is one at a time."""
        return f"tune-{zlib.crc32(self.store.url.encode()):08x}"

    def prepare(self, console: Console) -> None:
        """Ends what is left of the trial of a call that was killed, and runs what the stage needs, unless an
        earlier call has. Raises what a run raises, and SubmitError where a stage does not get done."""
        process.clear(self._driver, run_id=self.run_id, grace_seconds=0.0)
        spec = self.pipeline.spec
        text, overrides = self.pipeline.text, self.pipeline.overrides
        submission = Submission(
            self.pipeline.path, text, overrides, spec, self.store.url, self.folder, run_id=self.run_id
        )
        adopt.claim(self.store, self.backend, submission, console)
        if self.backend.outlives_driver:
            with HeldLease(self.store, self.run_id):  # nobody else tunes it
                run = read_run(self.store, self.run_id)
                self.backend.clear(self.store, run, timeout_seconds=CLEAR_SECONDS)
        for name in self._needed():
            if read_run(self.store, self.run_id).stages[name].state != "done":
                self.note(f"running {name}, which {self.stage} needs")
                stop = StopRequest()
                with heard((signal.SIGINT, signal.SIGTERM), stop):
                    state = drive(self.store, self.run_id, DriveOptions(only=name), stop=stop).stages[name]
                if state.state != "done":
                    raise SubmitError(f"{name!r} did not get done: {state.message}", where=self.store.url)

    def _needed(self) -> list[str]:
        """Each behind what it needs itself."""
        needs = planning.needs(self.pipeline.spec)
        order, wanted = list(TopologicalSorter(needs).static_order()), {self.stage}
        for name in reversed(order):
            if name in wanted:
                wanted |= set(needs[name])
        return [name for name in order if name in wanted - {self.stage}]

    def plan(self, config: Config, attempt: int = 1) -> Plan:
        """Raises PlanError or SpecError."""
        changed = self.pipeline.override(list(sets_of(config)))
        fetch = not self.backend.outlives_driver
        make = planning.planner(self.store, self.run_id, changed.spec, self.backend.hardware, fetch=fetch)
        plan = make(self.stage, attempt)
        work = plan.work
        assert isinstance(work, TrainPlan)
        once = plan.launch._replace(max_restarts=0)
        cluster = plan.cluster and plan.cluster._replace(max_gang_restarts=0)
        return replace(plan, work=work._replace(resume=False), launch=once, cluster=cluster)

    def seconds(self, config: Config) -> float | None:
        """Of a step: the median after the first third, which warms up. None where it fails, and says why.
        Raises TimeOverError."""
        key = f"runs/{self.run_id}/stages/{self.stage}"
        attempt = max(list_attempts(self.store, key), default=0) + 1
        try:
            plan = self.plan(config, attempt)
            self._run(plan)
        except TimeOverError:
            raise
        except MlpipeError as error:
            self.note(f"  does not run: {error.message}")
            return None
        finally:
            with contextlib.suppress(MlpipeError):
                self.store.delete([one.key for one in self.store.list(f"{key}/checkpoints")])
        records = read_records(self.store, plan.attempt_key, 0)
        taken = [record.seconds for record in records if isinstance(record, Step) and record.seconds]
        return median(taken[len(taken) // 3 :]) if taken else None

    def _run(self, plan: Plan) -> None:
        """Until it has ended. Raises SubmitError where it fails, TimeOverError at the deadline."""
        run = read_run(self.store, self.run_id)
        backend = type(self.backend).of_driver(run, self.pipeline.spec)
        executor = backend.executor(self.store, run, self._driver)
        executor.check(plan)
        if isinstance(executor, ProcessExecutor):
            executor.standbys = self.standbys
        scratch = planning.scratch_folder(self.store.url, f"{self.run_id}-{plan.attempt}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self.store.put(f"{plan.attempt_key}/plan.json", plan.to_json().encode())
        handle, told = executor.start(plan, scratch), ""
        try:
            while (ended := handle.poll()) is None:
                if time.monotonic() > self.deadline:
                    raise TimeOverError("time is over")
                if (words := handle.note()) != told:
                    told = words
                    self.note(f"  {words}") if words else None
                time.sleep(_LOOK_SECONDS)
        finally:
            gone = time.monotonic() + _END_SECONDS
            while handle.poll() is None and time.monotonic() < gone:
                handle.kill()
                time.sleep(_LOOK_SECONDS)
            shutil.rmtree(scratch, ignore_errors=True)
        if ended.state != "done":
            raise SubmitError(ended.message)


def shortened(pipeline: LoadedPipeline, stage: str, steps: int) -> LoadedPipeline:
    """With trainings of so many steps, which tell nobody."""
    key = f"stages.{stage}.train"
    quiet: dict[str, Any] = {f"{key}.track": None, f"{key}.profile": None, f"{key}.validate": None}
    return pipeline.smoke(steps=steps).override({**quiet, f"{key}.checkpoint.every": f"{steps} steps"})
