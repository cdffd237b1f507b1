"""Makes the run that is asked for, or adopts it if it is there, and gives it a driver unless it has one."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from mlpipe._core.errors import StoreError
from mlpipe._core.files import check_name, user_name
from mlpipe._core.ids import new_run_id
from mlpipe.plan.training import starts_from_weights, trainings
from mlpipe.spec.model import Pipeline
from mlpipe.store import leases, runs, wanted
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState
from mlpipe.submit import seal
from mlpipe.submit.backend import Backend
from mlpipe.submit.changes import NONE, Changes, apply, prepare, under_way
from mlpipe.submit.git import git_commit
from mlpipe.submit.planning import check_needs, needs, probe_scratch
from mlpipe.submit.submission import Console, Submission

LET_GO_SECONDS = 10.0  # for a driver whose run has ended to let go of it


def claim(store: Store, backend: Backend, submission: Submission, console: Console) -> str:
    """The id of a new run, or of the one that has the submission's already, if that was asked for with the
    same pipeline. Raises what `Backend.check` raises, before anything is written."""
    run_id = submission.run_id
    if run_id is not None and is_there(store, run_id, submission.pipeline):
        backend.check(submission, console, is_new=False)
        return run_id
    try:
        return create(store, backend, submission, console)
    except StoreError as error:  # another branch of the build was quicker
        if run_id is None or error.kind != "input" or not is_there(store, run_id, submission.pipeline):
            raise
        return run_id


def is_there(store: Store, run_id: str, pipeline: Pipeline) -> bool:
    """Whether the run exists. Raises SubmitError (input) if the run is of another pipeline, and StoreError
    (input) for what no run can be called."""
    runs.check_new_id(run_id)
    if not store.exists(f"runs/{run_id}/run.json"):
        return False
    seal.vouched(store, runs.read_run(store, run_id), pipeline)
    return True


def create(store: Store, backend: Backend, submission: Submission, console: Console) -> str:
    """The id of a pending run, which nobody drives yet. Raises what `Backend.check` and
    `probe` raise, before anything is written, and StoreError (input) when the id is taken."""
    pipeline = submission.pipeline
    if submission.run_id is None:  # "" was asked for, as by an empty variable of a shell
        submission = replace(submission, run_id=new_run_id(pipeline.name))
    assert submission.run_id is not None
    runs.check_new_id(submission.run_id)
    for name in (submission.folder, submission.spec):
        check_name(name)
    starts = _starts(backend, submission)  # first, since it says the line
    backend.check(submission, console, is_new=True)
    more = {"init_from": starts} if starts else {}
    probe(store, backend)
    return record(store, backend, submission, [stage.name for stage in pipeline.stages], **more)


def probe(store: Store, backend: Backend) -> None:
    """Raises StoreError and SubmitError where a run could not be kept, or its driver here had no scratch."""
    if not backend.has_own_driver:
        probe_scratch()
    store.probe()


def record(store: Store, backend: Backend, submission: Submission, stages: list[str], **more: Any) -> str:
    """Writes the run of the submission, which has been checked; `more`: of its `meta`. Returns its id. Raises
    StoreError (input) when the id is taken."""
    pipeline, run_id = submission.pipeline, submission.run_id
    assert run_id is not None
    meta: dict[str, Any] = {
        "pipeline": pipeline.name,
        "spec": submission.spec,
        "set": list(submission.overrides),
        "folder": submission.folder,
        "host": socket.gethostname(),
        "user": user_name(),
        "git_commit": git_commit(submission.folder),
        "jenkins_build": os.environ.get("BUILD_TAG"),
        "jenkins_url": build_address(os.environ.get("BUILD_URL", "")),
        **more,
    }
    if backend.place:
        meta[backend.name] = backend.place
    runs.create_run(store, run_id, submission.text, pipeline.digest, stages, backend.name, meta)
    seal.keep(store, run_id, seal.of_submission(submission, backend))
    return run_id


def _starts(backend: Backend, submission: Submission) -> dict[str, Any]:
    """The weights that its trainings start from, as far as they are seen from here."""
    if not any(starts_from_weights(training) for training in trainings(submission.pipeline).values()):
        return {}
    from mlpipe.submit.starting import look_ahead

    return look_ahead(submission, lambda place: place.startswith("s3://") or not backend.outlives_driver)


def build_address(url: str) -> str | None:
    """Of a build, for links on boards and pages: without a user, a password or a query, whoever wrote them
    there; None for what is no address."""
    try:
        parts = urlsplit(url)
        host = f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname
    except ValueError:
        return None
    return f"{parts.scheme}://{host}{parts.path}" if parts.scheme in ("http", "https") and host else None


@dataclass(frozen=True)
class DriveRequest:
    """A run, or its stage `only`, which somebody wants to have driven."""

    backend: Backend
    store: Store
    run_id: str
    pipeline: Pipeline
    only: str | None
    console: Console

    def start_driver(self) -> None:
        """Unless it has one, or is done. Raises SubmitError (input) if the stage cannot start."""
        if self.backend.has_own_driver:
            self.go_on(runs.read_run(self.store, self.run_id))
        elif self._ask():
            self._start()

    def go_on(self, seen: RunState, changes: Changes = NONE, before: seal.Seal | None = None) -> None:
        """The same with `changes` to what the run was asked for `before`. A run that has ended, as it was
        `seen`, is opened again by one of those who ask for it at once; the others adopt what that one
        started."""
        store, run_id, only = self.store, self.run_id, self.only
        run = self.backend.await_end_of_driver(store, run_id, only)
        driven = leases.is_driven(store, run)
        if changes and (run.is_under_way or driven or self.backend.driver_is_alive(run_id, only)):
            raise under_way(run_id)
        prepared = prepare(store, run, before, changes, only) if changes and before else None
        again = prepared.again if prepared else ()
        overtaken = False
        if again or (only is None and seen.state in ("failed", "cancelled")):
            try:
                runs.reopen(store, run_id, None if only is None else (), again=again, seen=seen)
            except StoreError:
                run = runs.read_run(store, run_id)
                overtaken = run.seq != seen.seq
                if not overtaken:
                    raise
                if changes:
                    raise under_way(run_id) from None
                self.console.note(f"somebody else has resumed run {run_id} meanwhile: following that")
        if prepared is not None:
            apply(store, run_id, prepared)
        if not (overtaken and run.state in runs.RUN_ENDED) and self._ask():
            self._start()

    def await_heard(self) -> None:
        """For one who leaves: the driver may have ended just before it could hear that `only` is wanted."""
        store, run_id, only = self.store, self.run_id, self.only
        deadline = time.monotonic() + LET_GO_SECONDS
        while only is not None and wanted.is_asked(store, run_id, only) and time.monotonic() < deadline:
            run = runs.read_run(store, run_id, known=True)
            if not leases.is_driven(store, run) and not self.backend.driver_is_alive(run_id, only):
                self.start_driver()
                return
            time.sleep(0.2)

    def _start(self) -> None:
        run = runs.read_run(self.store, self.run_id)
        self.backend.start_driver(self.store, run, self.pipeline, self.only)

    def _ask(self) -> bool:
        """Leaves word that the stage is wanted, unless it is done or runs. Whether a driver must be
        started."""
        run = runs.read_run(self.store, self.run_id, known=True)
        driven = leases.is_driven(self.store, run)
        if self.only is None:
            return run.state != "done" and not driven
        check_needs(needs(self.pipeline), run, self.only)
        state = run.stages[self.only].state
        if state != "done" and not (state == "running" and driven):
            wanted.ask(self.store, self.run_id, self.only)
        return state != "done" and not driven
