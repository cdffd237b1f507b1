"""A client for the few calls that submit makes to a Jenkins: trigger a build once, find it, follow its log.

By python-jenkins, but for two calls: its trigger writes the parameters into the URL, which access logs keep
and which ends at 8 KB, and it has no log that is still being written (docs/adr/0011).

A POST is sent once. When its answer is lost, the build is looked for by its parameter RUN_ID, in the queue
and among the builds; it is never sent again on a guess.

Sources: ParameterizedJobMixIn.java, Queue.java, stapler's LargeText.java.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import requests

from mlpipe._core.errors import ErrorKind, SubmitError
from mlpipe.submit.jenkins.http import (
    PATIENCE_SECONDS,
    Access,
    JenkinsError,
    JenkinsHttp,
    LostError,
)

RUN_ID = "RUN_ID"  # the parameter by which a build is found again
RESTART_SECONDS = 600.0  # for a controller that restarts while its build is followed
_LOST_SECONDS = 20.0  # for a build whose trigger had no answer to show up
_MAX_BUILDS = 100  # the latest ones, among which a build is looked for
_RESULTS: dict[str, ErrorKind | None] = {"SUCCESS": None, "ABORTED": "cancelled"}


@dataclass(frozen=True)
class Waiting:
    """A build in the queue."""

    job: str
    run_id: str
    item: int


@dataclass(frozen=True)
class Build:
    """`result`: None while it runs."""

    job: str
    number: int
    url: str
    result: str | None = field(default=None, compare=False)


class Jenkins(JenkinsHttp):
    """Every method raises SubmitError with what Jenkins said, in words. `poll_seconds`: between two looks."""

    def __init__(
        self,
        access: Access,
        *,
        poll_seconds: float = 2.0,
        patience_seconds: float = PATIENCE_SECONDS,
        lost_seconds: float = _LOST_SECONDS,
    ) -> None:
        super().__init__(access, poll_seconds=poll_seconds, patience_seconds=patience_seconds)
        self._lost_seconds = lost_seconds

    def trigger(self, job: str, parameters: Mapping[str, str]) -> Waiting | Build:
        """Starts a build of `job`, or returns the one that has the same RUN_ID, unless it ended without
        success: the new one goes on with its run."""
        run_id = parameters[RUN_ID]
        self.check(job, parameters)
        former, before = self.find(job, run_id), 0
        if isinstance(former, Build) and former.result not in (None, "SUCCESS"):
            before = former.number
        elif former is not None:
            return former
        path = f"{job_path(job)}/buildWithParameters"
        request = requests.Request("POST", f"{self._access.url}/{path}", data=dict(parameters))
        try:
            answer = self._post(path, lambda: self._client.jenkins_request(request))
        except LostError as error:
            return self._find_lost(job, run_id, before, str(error))
        match = re.search(r"/queue/item/([0-9]+)/?$", answer.headers.get("Location", ""))
        if match is None:
            return self._find_lost(job, run_id, before, "it named no queue item")
        return Waiting(job, run_id, int(match[1]))

    def find(self, job: str, run_id: str, after: int = 0) -> Waiting | Build | None:
        """The build of `job` with this RUN_ID and a number above `after`: the latest one, or in the queue."""
        for _ in range(2):  # from the queue it may have become a build while we looked there
            tree = f"builds[number,result,actions[parameters[name,value]]]{{0,{_MAX_BUILDS}}}"
            for build in self._info(job_item(job), tree).get("builds") or ():
                if _run_id(build) == run_id and build["number"] > after:
                    return self._build(job, build["number"], build.get("result"))
            tree = "items[id,task[url],actions[parameters[name,value]]]"
            for item in self._info("queue", tree).get("items") or ():
                address = urlsplit((item.get("task") or {}).get("url") or "").path.rstrip("/")
                if _run_id(item) == run_id and address.endswith("/" + job_path(job)):
                    return Waiting(job, run_id, item["id"])
        return None

    def ping(self) -> None:
        """Raises SubmitError where it does not answer, or does not know whoever asks."""
        self._info("queue", "items[id]")

    def wait_for_build(
        self, waiting: Waiting, timeout_seconds: float, say: Callable[[str], None] = lambda why: None
    ) -> Build:
        """Until it has left the queue; `say(why)` is called when the reason why it waits changes."""
        deadline, said = time.monotonic() + timeout_seconds, ""
        while True:
            place = self.look(waiting)
            if isinstance(place, Build):
                return place
            if place != said:
                say(place)
                said = place
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"the build of run {waiting.run_id} is still in the queue after "
                    f"{timeout_seconds:.0f} s: {place}",
                    hint="it starts when it can",
                )
            time.sleep(self._poll_seconds)

    def look(self, waiting: Waiting) -> Build | str:
        """The build, once it has left the queue, else why it waits."""
        try:
            item = self._ask_for_json(
                f"queue/item/{waiting.item}", lambda: self._client.get_queue_item(waiting.item)
            )
        except JenkinsError as error:
            if error.status != 404:
                raise
            # Jenkins forgets an item five minutes after it left the queue
            build = self.find(waiting.job, waiting.run_id)
            if isinstance(build, Build):
                return build
            raise SubmitError(
                f"the build of run {waiting.run_id} is neither in the queue nor among the last "
                f"{_MAX_BUILDS} builds of {waiting.job}"
            ) from None
        if item.get("cancelled"):
            raise SubmitError(f"somebody cancelled the build of run {waiting.run_id}", kind="cancelled")
        if item.get("executable"):
            return self._build(waiting.job, item["executable"]["number"])
        return str(item.get("why") or "")

    def follow_log(self, build: Build, offset: int = 0) -> Iterator[tuple[bytes, int]]:
        """New text of the build's log and the offset after it, until the log is complete. A controller that
        restarts meanwhile is waited for; a log that became shorter is read again from its start."""
        path = f"{job_path(build.job)}/{build.number}/logText/progressiveText"
        while True:
            url = f"{self._access.url}/{path}?start={offset}"
            request = requests.Request("GET", url)
            answer = self._ask(path, lambda: self._client.jenkins_request(request), RESTART_SECONDS)  # noqa: B023
            try:
                size = int(answer.headers.get("X-Text-Size", ""))
            except ValueError:
                raise SubmitError("the answer is no log of a Jenkins", where=self._access.url) from None
            if size < offset:
                yield b"(the log was cut in Jenkins; what is left of it follows)\n", 0
            offset = size
            if answer.content:
                yield answer.content, offset
            if answer.headers.get("X-More-Data") != "true":
                return
            if not answer.content:
                time.sleep(self._poll_seconds)

    def result(self, build: Build, timeout_seconds: float = 60.0) -> str:
        """SUCCESS, UNSTABLE, FAILURE, ABORTED or NOT_BUILT of a build whose log is complete."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            document = self._ask_for_json(
                f"{job_path(build.job)}/{build.number}",
                lambda: self._client.get_build_info(build.job.strip("/"), build.number),
                RESTART_SECONDS,
            )
            if not document.get("building") and document.get("result"):
                return str(document["result"])
            if time.monotonic() > deadline:
                raise SubmitError(f"has no result after {timeout_seconds:.0f} s", where=build.url)
            time.sleep(self._poll_seconds)

    def stop(self, target: Waiting | Build) -> None:
        """Aborts the build, or takes it out of the queue. Asking twice does no harm, so it is asked again
        when the answer was lost."""
        for last in (False, True):
            try:
                if isinstance(target, Build):
                    path = f"{job_path(target.job)}/{target.number}/stop"
                    self._post(path, lambda: self._client.stop_build(target.job.strip("/"), target.number))
                else:
                    self._post("queue/cancelItem", lambda: self._client.cancel_queue(target.item))
            except LostError as error:
                if last:
                    raise SubmitError(f"did not answer: {error}", where=self._access.url) from None
            except JenkinsError as error:
                if error.status not in (302, 303):  # it has, and sends on to a page
                    raise
                return
            else:
                return

    # What a trigger needs

    def check(self, job: str, parameters: Mapping[str, str]) -> None:
        """Raises SubmitError (input) where a trigger would be refused, or would lose a parameter."""
        tree = "property[parameterDefinitions[name,choices,defaultParameterValue[name]]]"
        known: dict[str, dict[str, Any]] = {
            definition["name"]: definition
            for prop in self._info(job_item(job), tree).get("property") or ()
            for definition in prop.get("parameterDefinitions") or ()
        }
        has = f"it has {', '.join(known) or 'none'}"
        if unknown := sorted(set(parameters) - set(known)):  # Jenkins would drop them without a word
            raise SubmitError(
                f"the job {job} has no parameter {', '.join(unknown)}; {has}",
                hint="a job knows the parameters of its Jenkinsfile after its first build",
                kind="input",
            )
        if missing := [
            name
            for name, definition in known.items()
            if name not in parameters and definition.get("defaultParameterValue") is None
        ]:
            raise SubmitError(
                f"the job {job} needs {', '.join(missing)}, which has no default; {has}",
                hint="add --parameter NAME=VALUE",
                kind="input",
            )
        for name, value in parameters.items():
            choices = known[name].get("choices")
            if choices and value not in choices:
                raise SubmitError(
                    f"the parameter {name} of the job {job} is one of {', '.join(choices)}, not {value!r}",
                    kind="input",
                )

    def _find_lost(self, job: str, run_id: str, before: int, why: str) -> Waiting | Build:
        deadline = time.monotonic() + self._lost_seconds
        while (target := self.find(job, run_id, before)) is None:
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"the answer to the trigger was lost ({why}), and no build of {job} with "
                    f"{RUN_ID}={run_id} showed up within {self._lost_seconds:.0f} s",
                    where=self._access.url,
                    hint="ask again with the same run id: a build that is there by then is adopted",
                )
            time.sleep(self._poll_seconds)
        return target

    def _info(self, item: str, tree: str) -> dict[str, Any]:
        """Of the server's `item` what `tree` names."""
        return self._ask_for_json(
            quote(item), lambda: self._client.get_info(item, f"?{urlencode({'tree': tree})}")
        )

    def _build(self, job: str, number: int, result: str | None = None) -> Build:
        return Build(job, number, f"{self._access.url}/{job_path(job)}/{number}/", result)


def job_item(job: str) -> str:
    """`team/train` -> `job/team/job/train`, as python-jenkins takes it."""
    return "/".join(f"job/{part}" for part in job.strip("/").split("/"))


def job_path(job: str) -> str:
    """The same in a URL. A branch `a/b` of a multibranch job is `team/train/a%2Fb`, as
    Jenkins names it."""
    return quote(job_item(job))


def failure_of(result: str) -> ErrorKind | None:
    """Whose fault a build's result is; None: it is none."""
    return _RESULTS.get(result, "failed")


def _run_id(document: Mapping[str, Any]) -> str | None:
    for action in document.get("actions") or ():
        for parameter in action.get("parameters") or ():
            if parameter.get("name") == RUN_ID:
                return str(parameter.get("value"))
    return None
