"""The backend `jenkins`: a build of a job there makes the run, on another backend, and follows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from mlpipe._core.errors import SubmitError
from mlpipe.submit import backends
from mlpipe.submit.delegate import Delegate, HandedOver, Requested
from mlpipe.submit.submission import Console, Finding, Option, Preview, Rendered, Submission, attempt

if TYPE_CHECKING:
    from mlpipe.store.base import Store


class JenkinsBackend(Delegate):
    """A job of a controller. `place`: `job`, and `parameter`, of the build besides ours: NAME=VALUE each."""

    name = "jenkins"
    options = (
        Option("--job", "FOLDER/JOB", "Of Jenkins: what is built.", required=True),
        Option(
            "--parameter",
            "NAME=VALUE",
            "Of the Jenkins job, besides RUN_ID, STORE and SPEC_DIGEST. Repeatable.",
            repeated=True,
        ),
    )
    renders = True

    def preview(self, submission: Submission, console: Console, *, on_server: bool = False) -> Preview:
        from mlpipe.submit.jenkins.hand_over import parameters_of, would_post

        parameters = parameters_of(submission, self._parameters())
        document = would_post(submission, self.place["job"], parameters)
        return Preview(document, json.dumps(document, indent=2))

    def hand_over(self, submission: Submission, store: Store, console: Console, *, wait: bool) -> HandedOver:
        from mlpipe.submit.jenkins.hand_over import hand_over, parameters_of

        parameters = parameters_of(submission, self._parameters())
        return hand_over(submission, store, console, self.place["job"], parameters, wait=wait)

    @classmethod
    def requested(cls, store: Store, run_id: str) -> Requested | None:
        from mlpipe.submit.jenkins.build_request import read

        if (request := read(store, run_id)) is None:
            return None
        from mlpipe.submit.jenkins.hand_over import RequestedBuild

        return RequestedBuild(store, request)

    def doctor(self, store: Iterable[Finding]) -> Iterator[Finding]:
        from mlpipe.submit.jenkins.client import Jenkins
        from mlpipe.submit.jenkins.http import Access

        access = attempt("access", lambda: Access.from_environment(os.environ))
        if isinstance(access, Finding):
            yield access
            return
        yield Finding("access", "ok", f"user {access.user} at {access.url}")
        if (refused := attempt("server", Jenkins(access).ping)) is not None:
            yield refused
            return
        yield Finding("server", "ok", "answers")
        yield from store

    def render(self, submission: Submission, console: Console) -> Rendered:
        from mlpipe.render.jenkins import jenkinsfile

        if submission.stage is not None or submission.run_id is not None:
            raise SubmitError(
                "--stage and --run-id are of --for kubernetes: a build has all stages and its own run",
                kind="input",
            )
        store = submission.store_url
        takers = backends.takers(submission.pipeline)
        text = jenkinsfile(submission.pipeline, submission.spec, submission.overrides, store, takers)
        if not store.startswith("s3://"):
            words = "is a folder of the agent, and is gone with an agent that is a pod"
            console.note(f"warning: the store {store} {words}")
        return Rendered({"": text}, Preview({"jenkinsfile": text}, text.rstrip("\n")))

    def _parameters(self) -> dict[str, str]:
        given: Iterable[Any] = self.place.get("parameter", ())
        for one in given:
            if "=" not in one:
                raise SubmitError(f"--parameter {one!r} is not NAME=VALUE", kind="input")
        return {name: value for name, _, value in (one.partition("=") for one in given)}
