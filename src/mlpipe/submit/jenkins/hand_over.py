"""Has a build of Jenkins make a run: triggered once, followed to its end, looked at and aborted."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from mlpipe._core.errors import MlpipeError, SubmitError
from mlpipe._core.ids import is_name, new_run_id
from mlpipe.store.base import Store
from mlpipe.submit.adopt import is_there
from mlpipe.submit.delegate import HandedOver, Requested
from mlpipe.submit.jenkins import build_request
from mlpipe.submit.jenkins.build_request import BuildRequest
from mlpipe.submit.jenkins.client import RUN_ID, Build, Jenkins, Waiting, failure_of, job_path
from mlpipe.submit.jenkins.http import Access
from mlpipe.submit.submission import Console, Submission

_LOOK_SECONDS = 10.0  # for a build to leave the queue, whose URL is then known (a quiet period has 5)
_QUEUE_SECONDS = 7 * 24 * 3600.0
_POLL_SECONDS = 0.5


def parameters_of(submission: Submission, given: Mapping[str, str]) -> dict[str, str]:
    """What the build is given: by them it finds the run, and the pipeline in the store."""
    run_id = submission.run_id or new_run_id(submission.pipeline.name)
    if not is_name(run_id):
        raise SubmitError(f"{run_id!r} is not a run id", hint="use a-z, 0-9, '.', '_' and '-'", kind="input")
    digest = submission.pipeline.digest
    return {**given, RUN_ID: run_id, "STORE": submission.store_url, "SPEC_DIGEST": digest}


def would_post(submission: Submission, job: str, parameters: Mapping[str, str]) -> dict[str, Any]:
    """What `--dry-run` prints."""
    access = Access.from_environment(os.environ)
    return {
        "post": f"{access.url}/{job_path(job)}/buildWithParameters",
        "parameters": dict(parameters),
        "pipeline": submission.pipeline.resolved_yaml(),
    }


def hand_over(
    submission: Submission,
    store: Store,
    console: Console,
    job: str,
    parameters: Mapping[str, str],
    *,
    wait: bool,
) -> HandedOver:
    """See `Delegate.hand_over`."""
    access = Access.from_environment(os.environ)
    run_id = parameters[RUN_ID]
    jenkins = Jenkins(access)
    jenkins.check(job, parameters)  # before anything is written
    is_there(store, run_id, submission.pipeline)  # as another pipeline's?
    digest, text = submission.pipeline.digest, submission.pipeline.resolved_yaml()
    version = build_request.SCHEMA_VERSION
    new = build_request.ask(store, BuildRequest(version, run_id, access.url, job, digest, text))
    try:
        try:
            build = jenkins.trigger(job, parameters)
        except SubmitError as error:
            if new and error.kind == "input":
                build_request.forget(store, run_id)
            raise
        if wait:
            return _follow(console, jenkins, store, build, run_id)
        deadline = time.monotonic() + _LOOK_SECONDS
        where, why = _where(access.url, build), ""
        while isinstance(build, Waiting) and time.monotonic() < deadline:
            looked = jenkins.look(build)
            if isinstance(looked, Build):
                where, why = looked.url, ""
                break
            why = looked
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        console.complain(
            f"detached; the build of run {run_id} goes on. Come back with the same command and --run-id "
            f"{run_id}, see it with `mlpipe status {run_id}`, stop it with `mlpipe cancel {run_id}`"
        )
        raise
    if why:
        console.note(f"it waits in the queue: {why}")
    console.note(f"see it with `mlpipe status {run_id}`, stop it with `mlpipe cancel {run_id}`")
    document = {"run_id": run_id, "store": store.url, "job": job, "build": where}
    return HandedOver(document, f"{run_id}\n{where}")


def _where(url: str, build: Waiting | Build) -> str:
    return build.url if isinstance(build, Build) else f"{url}/queue/item/{build.item}/"


def _follow(
    console: Console, jenkins: Jenkins, store: Store, asked: Waiting | Build, run_id: str
) -> HandedOver:
    """Until the build has ended."""
    console.note(f"run {run_id} in {store.url}; Ctrl-C leaves it running")
    if isinstance(asked, Build):
        console.note(f"run {run_id} has a build already: it is followed, and no other is started")
        build = asked
    else:
        build = jenkins.wait_for_build(
            asked, _QUEUE_SECONDS, lambda why: console.note(f"in the queue: {why}") if why else None
        )
    console.note(f"build {build.url}")
    for text, _ in jenkins.follow_log(build):
        if not console.quiet:
            sys.stderr.buffer.write(text)
            sys.stderr.flush()
    result = jenkins.result(build)
    document = {"run_id": run_id, "store": store.url, "job": build.job, "build": build.url, "result": result}
    return HandedOver(document, f"{run_id}\n{build.url} {result}", failure_of(result))


class RequestedBuild(Requested):
    """The request for a build, and the build that came of it."""

    def __init__(self, store: Store, request: BuildRequest) -> None:
        self.run_id, self.pipeline = request.run_id, request.pipeline
        self.key = build_request.key_of(request.run_id)
        self._store, self._request = store, request

    def status(self) -> dict[str, Any]:
        """`state` is queued, building, or how the build ended."""
        request = self._request
        document = {
            "run_id": request.run_id,
            "store": self._store.url,
            "state": "queued",
            "jenkins": request.jenkins,
            "job": request.job,
            "build": None,
            "message": "",
        }
        try:
            jenkins = self._connect()
            build = jenkins.find(request.job, request.run_id)
            if build is None:
                return {**document, "message": "Jenkins has no such build (any more)"}
            looked = build if isinstance(build, Build) else jenkins.look(build)
            if isinstance(looked, str):
                return {**document, "build": _where(request.jenkins, build), "message": looked}
            state = (looked.result or "building").lower()
            return {**document, "build": looked.url, "state": state, "message": "it has made no run"}
        except MlpipeError as error:
            return {**document, "message": error.message}

    def text(self, status: dict[str, Any]) -> str:
        where = status["build"] or f"{status['jenkins']} (job {status['job']})"
        return f"{status['run_id']}  {status['state']}: {status['message'] or 'no reason given'}\n  {where}"

    def abort(self, console: Console, timeout_seconds: float) -> bool:
        """Ends the build, or takes it out of the queue. While its run exists, a Jenkins that cannot be asked
        is only complained about."""
        request = self._request
        try:
            jenkins = self._connect()
            build = jenkins.find(request.job, request.run_id)
            if build is None or (isinstance(build, Build) and build.result is not None):
                return True
            jenkins.stop(build)
        except MlpipeError as error:
            if not self._has_run():
                raise
            console.complain(f"the build was not aborted, and may go on with later stages: {error.message}")
            return False
        deadline = time.monotonic() + timeout_seconds
        while True:
            build = jenkins.find(request.job, request.run_id)
            if build is None or (isinstance(build, Build) and build.result is not None):
                return True
            if self._has_run():
                return False  # its own `mlpipe cancel` waits for the run, and so do we
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"the build of run {request.run_id} was asked to stop and has not "
                    f"stopped within {timeout_seconds:.0f} s",
                    where=_where(request.jenkins, build),
                )
            time.sleep(_POLL_SECONDS)

    def give_up(self) -> None:
        build_request.give_up(self._store, self.run_id)

    def _has_run(self) -> bool:
        return self._store.exists(f"runs/{self.run_id}/run.json")

    def _connect(self) -> Jenkins:
        """Credentials go where the environment says, not where an object of the store does."""
        url = self._request.jenkins
        where = f"its Jenkins is {url}"
        if "JENKINS_URL" not in os.environ:
            raise SubmitError(f"{where}, and JENKINS_URL is not set", hint="export JENKINS_URL", kind="input")
        access = Access.from_environment(os.environ)
        if access.url != url:
            hint = "export the other"
            raise SubmitError(f"{where}, and JENKINS_URL is {access.url}", hint=hint, kind="input")
        return Jenkins(access, poll_seconds=_POLL_SECONDS)
