"""What `submit`, `status`, `logs` and `cancel` do for a run that is a build of Jenkins."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import EXIT_CODES, MlpipeError, SubmitError
from mlpipe.cli.session import Session, interrupt

if TYPE_CHECKING:
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.submit.jenkins.build_request import BuildRequest
    from mlpipe.submit.jenkins.client import Build, Jenkins, Waiting

_LOOK_SECONDS = 10.0  # for a build to leave the queue, whose URL is then known (a quiet period has 5)
_QUEUE_SECONDS = 7 * 24 * 3600.0
_POLL_SECONDS = 0.5


def submit(
    session: Session,
    pipeline: Pipeline,
    job: str,
    given: Mapping[str, str],
    run_id: str | None,
    *,
    wait: bool,
    dry_run: bool,
) -> int:
    from mlpipe._core.ids import is_name, new_run_id
    from mlpipe.cli.submit import is_there
    from mlpipe.submit.jenkins import build_request
    from mlpipe.submit.jenkins.client import RUN_ID, Build, Jenkins, Waiting, job_path
    from mlpipe.submit.jenkins.http import Access

    run_id = run_id or new_run_id(pipeline.name)
    if not is_name(run_id):
        raise SubmitError(f"{run_id!r} is not a run id", hint="use a-z, 0-9, '.', '_' and '-'", kind="input")
    access = Access.from_environment(os.environ)
    store = session.open_store(pipeline.store)
    parameters = {**given, RUN_ID: run_id, "STORE": store.url, "SPEC_DIGEST": pipeline.digest}
    if dry_run:
        document = {
            "post": f"{access.url}/{job_path(job)}/buildWithParameters",
            "parameters": parameters,
            "pipeline": pipeline.resolved_yaml(),
        }
        session.result(document, json.dumps(document, indent=2))
        return 0
    jenkins = Jenkins(access)
    jenkins.check(job, parameters)  # before anything is written
    is_there(store, run_id, pipeline)  # as another pipeline's?
    text = pipeline.resolved_yaml()
    new = build_request.ask(
        store,
        build_request.BuildRequest(
            build_request.SCHEMA_VERSION, run_id, access.url, job, pipeline.digest, text
        ),
    )
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # it detaches, as Ctrl-C does
        signal.signal(signal.SIGTERM, interrupt)
    try:
        try:
            target = jenkins.trigger(job, parameters)
        except SubmitError as error:
            if new and error.kind == "input":
                build_request.forget(store, run_id)
            raise
        if wait:
            return _follow(session, jenkins, store, target, run_id)
        deadline = time.monotonic() + _LOOK_SECONDS
        where, why = _where(access.url, target), ""
        while isinstance(target, Waiting) and time.monotonic() < deadline:
            looked = jenkins.look(target)
            if isinstance(looked, Build):
                where, why = looked.url, ""
                break
            why = looked
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        session.complain(
            f"detached; the build of run {run_id} goes on. Come back with the same command and --run-id "
            f"{run_id}, see it with `mlpipe status {run_id}`, stop it with `mlpipe cancel {run_id}`"
        )
        return EXIT_CODES["interrupted"]
    session.result({"run_id": run_id, "store": store.url, "job": job, "build": where}, f"{run_id}\n{where}")
    if why:
        session.note(f"it waits in the queue: {why}")
    session.note(f"see it with `mlpipe status {run_id}`, stop it with `mlpipe cancel {run_id}`")
    return 0


def _where(url: str, target: Waiting | Build) -> str:
    from mlpipe.submit.jenkins.client import Build

    return target.url if isinstance(target, Build) else f"{url}/queue/item/{target.item}/"


def _follow(session: Session, jenkins: Jenkins, store: Store, target: Waiting | Build, run_id: str) -> int:
    """Until the build has ended; its result as an exit code."""
    from mlpipe.submit.jenkins.client import Build, failure_of

    session.note(f"run {run_id} in {store.url}; Ctrl-C leaves it running")
    if isinstance(target, Build):
        session.note(f"run {run_id} has a build already: it is followed, and no other is started")
        build = target
    else:
        build = jenkins.wait_for_build(
            target, _QUEUE_SECONDS, lambda why: session.note(f"in the queue: {why}") if why else None
        )
    session.note(f"build {build.url}")
    for text, _ in jenkins.follow_log(build):
        if not session.quiet:
            sys.stderr.buffer.write(text)
            sys.stderr.flush()
    result = jenkins.result(build)
    session.result(
        {"run_id": run_id, "store": store.url, "job": build.job, "build": build.url, "result": result},
        f"{run_id}\n{build.url} {result}",
    )
    kind = failure_of(result)
    return 0 if kind is None else EXIT_CODES[kind]


def asked_for(store: Store, run_id: str) -> BuildRequest | None:
    """What a build was asked for that has not made the run yet."""
    from mlpipe.submit.jenkins import build_request

    return None if store.exists(f"runs/{run_id}/run.json") else build_request.read(store, run_id)


def stands(store: Store, asked: BuildRequest) -> dict[str, Any]:
    """Of a run that is not there yet: `state` is queued, building, or how the build ended."""
    from mlpipe.submit.jenkins.client import Build

    document = {
        "run_id": asked.run_id,
        "store": store.url,
        "state": "queued",
        "jenkins": asked.jenkins,
        "job": asked.job,
        "build": None,
        "message": "",
    }
    try:
        jenkins = _connect(asked)
        target = jenkins.find(asked.job, asked.run_id)
        if target is None:
            return {**document, "message": "Jenkins has no such build (any more)"}
        looked = target if isinstance(target, Build) else jenkins.look(target)
        if isinstance(looked, str):
            return {**document, "build": _where(asked.jenkins, target), "message": looked}
        state = (looked.result or "building").lower()
        return {**document, "build": looked.url, "state": state, "message": "it has made no run"}
    except MlpipeError as error:
        return {**document, "message": error.message}


def text_of(document: Mapping[str, Any]) -> str:
    where = document["build"] or f"{document['jenkins']} (job {document['job']})"
    return f"{document['run_id']}  {document['state']}: {document['message'] or 'no reason given'}\n  {where}"


def abort(session: Session, store: Store, asked: BuildRequest, timeout_seconds: float) -> bool:
    """Ends the build, or takes it out of the queue; True once it has ended. While its run exists, `cancel`
    goes on with that, and a Jenkins that cannot be asked is only complained about."""
    from mlpipe.submit.jenkins.client import Build

    is_run = store.exists(f"runs/{asked.run_id}/run.json")
    try:
        jenkins = _connect(asked)
        target = jenkins.find(asked.job, asked.run_id)
        if target is None or (isinstance(target, Build) and target.result is not None):
            return True
        jenkins.stop(target)
    except MlpipeError as error:
        if not is_run:
            raise
        session.complain(f"the build was not aborted, and may go on with later stages: {error.message}")
        return False
    deadline = time.monotonic() + timeout_seconds
    while True:
        target = jenkins.find(asked.job, asked.run_id)
        if target is None or (isinstance(target, Build) and target.result is not None):
            return True
        if store.exists(f"runs/{asked.run_id}/run.json"):
            return False  # its own `mlpipe cancel` waits for the run, and so do we
        if time.monotonic() > deadline:
            raise SubmitError(
                f"the build of run {asked.run_id} was asked to stop and has not "
                f"stopped within {timeout_seconds:.0f} s",
                where=_where(asked.jenkins, target),
            )
        time.sleep(_POLL_SECONDS)


def _connect(asked: BuildRequest) -> Jenkins:
    """Credentials go where the environment says, not where an object of the store does."""
    from mlpipe.submit.jenkins.client import Jenkins
    from mlpipe.submit.jenkins.http import Access

    where = f"its Jenkins is {asked.jenkins}"
    if "JENKINS_URL" not in os.environ:
        raise SubmitError(f"{where}, and JENKINS_URL is not set", hint="export JENKINS_URL", kind="input")
    access = Access.from_environment(os.environ)
    if access.url != asked.jenkins:
        raise SubmitError(f"{where}, and JENKINS_URL is {access.url}", hint="export the other", kind="input")
    return Jenkins(access, poll_seconds=_POLL_SECONDS)
