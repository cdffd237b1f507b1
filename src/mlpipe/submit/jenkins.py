"""A client for the few calls that submit makes to a Jenkins: trigger a build once, find it, follow its log.

On urllib3: of python-jenkins only the joining of URLs would be left, since its timeouts, retries, crumbs,
errors, parameters in the query and folders would all have to be replaced.

A POST is sent once. When its answer is lost, the build is looked for by its parameter RUN_ID, in the queue
and among the builds; it is never sent again on a guess. Addresses in answers are not followed: Jenkins makes
them from its own configured URL, and credentials go to JENKINS_URL alone.

Sources: jenkins.io (CSRF protection, remote access API), ParameterizedJobMixIn.java, stapler's
LargeText.java.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import urllib3

from mlpipe._core.errors import Kind, SubmitError

RUN_ID = "RUN_ID"  # the parameter by which a build is found again
PATIENCE_SECONDS = 30.0  # for an answer to a question that may be asked again
RESTART_SECONDS = 600.0  # for a controller that restarts while its build is followed
_LOST_SECONDS = 20.0  # for a build whose trigger had no answer to show up
_TIMEOUT = urllib3.Timeout(connect=10.0, read=30.0)
_MAX_BUILDS = 100  # the latest ones, among which a build is looked for
_BUSY = (500, 502, 503, 504)
_WORDS: dict[int, tuple[str, str, Kind]] = {
    401: ("does not know this user or token", "check JENKINS_USER_ID and JENKINS_API_TOKEN", "input"),
    403: ("knows the user and does not allow this", "it needs Job/Read, Job/Build, Job/Cancel", "input"),
    404: ("has no such job or build", "check FOLDER/JOB, and that the user has Job/Read", "input"),
    409: ("does not build this job: it is disabled", "enable it in Jenkins", "input"),
}  # fmt: skip
_RESULTS: dict[str, Kind | None] = {"SUCCESS": None, "ABORTED": "cancelled"}


@dataclass(frozen=True)
class Access:
    """Where a Jenkins is, and as whom to talk to it. `token`: an API token (or a password, which needs
    crumbs)."""

    url: str
    user: str | None
    token: str | None = field(repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Access:
        """JENKINS_URL, JENKINS_USER_ID, JENKINS_API_TOKEN. Raises SubmitError (input)."""
        url = environment.get("JENKINS_URL", "").rstrip("/")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SubmitError(
                "JENKINS_URL does not say where Jenkins is",
                hint="export JENKINS_URL=https://jenkins.example.com",
                kind="input",
            )
        if parts.username is not None or parts.query or parts.fragment:
            raise SubmitError(
                "JENKINS_URL must be an address and nothing else",
                hint="credentials go into JENKINS_USER_ID and JENKINS_API_TOKEN",
                kind="input",
            )
        user, token = environment.get("JENKINS_USER_ID"), environment.get("JENKINS_API_TOKEN")
        if (user is None) != (token is None):
            raise SubmitError("JENKINS_USER_ID and JENKINS_API_TOKEN belong together", kind="input")
        return cls(url, user, token)


@dataclass(frozen=True)
class Waiting:
    """A build in the queue."""

    job: str
    run_id: str
    item: int


@dataclass(frozen=True)
class Build:
    job: str
    number: int
    url: str


class JenkinsError(SubmitError):
    """`status`: of the answer."""

    def __init__(self, message: str, status: int, *, where: str, hint: str, kind: Kind) -> None:
        super().__init__(message, where=where, hint=hint, kind=kind)
        self.status = status


class _LostError(Exception):
    """No answer came, or half of one: what was asked may have been done."""


class Jenkins:
    """Every method raises SubmitError with what Jenkins said, in words. `poll_seconds`: between two looks."""

    def __init__(
        self,
        access: Access,
        *,
        poll_seconds: float = 2.0,
        patience_seconds: float = PATIENCE_SECONDS,
        lost_seconds: float = _LOST_SECONDS,
    ) -> None:
        self._access = access
        self._poll_seconds = poll_seconds
        self._patience_seconds = patience_seconds
        self._lost_seconds = lost_seconds
        self._http = urllib3.PoolManager(timeout=_TIMEOUT, retries=False)
        self._headers: dict[str, str] = {}
        if access.user is not None:
            pair = base64.b64encode(f"{access.user}:{access.token}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        self._crumb: dict[str, str] = {}

    def trigger(self, job: str, parameters: Mapping[str, str]) -> Waiting | Build:
        """Starts a build of `job`, or returns the one that has the same RUN_ID."""
        run_id = parameters[RUN_ID]
        self._check(job, parameters)
        if (found := self.find(job, run_id)) is not None:
            return found
        path = f"{job_path(job)}/buildWithParameters"
        try:
            answer = self._post(path, urlencode(parameters))
        except _LostError as error:
            return self._find_lost(job, run_id, str(error))
        match = re.search(r"/queue/item/([0-9]+)/?$", answer.headers.get("Location", ""))
        if match is None:
            return self._find_lost(job, run_id, "it named no queue item")
        return Waiting(job, run_id, int(match[1]))

    def find(self, job: str, run_id: str) -> Waiting | Build | None:
        """The build of `job` with this RUN_ID: in the queue, or among the latest builds."""
        for _ in range(2):  # from the queue it may have become a build while we looked there
            tree = f"builds[number,actions[parameters[name,value]]]{{0,{_MAX_BUILDS}}}"
            for build in self._get(job_path(job), tree).get("builds") or ():
                if _run_id(build) == run_id:
                    return self._build(job, build["number"])
            tree = "items[id,task[url],actions[parameters[name,value]]]"
            for item in self._get("queue", tree).get("items") or ():
                address = urlsplit((item.get("task") or {}).get("url") or "").path.rstrip("/")
                if _run_id(item) == run_id and address.endswith("/" + job_path(job)):
                    return Waiting(job, run_id, item["id"])
        return None

    def wait_for_build(
        self, waiting: Waiting, timeout_seconds: float, say: Callable[[str], None] = lambda why: None
    ) -> Build:
        """Until it has left the queue; `say(why)` is called when the reason why it waits changes."""
        deadline, said = time.monotonic() + timeout_seconds, ""
        while True:
            try:
                item = self._get(f"queue/item/{waiting.item}", "why,cancelled,executable[number]")
            except JenkinsError as error:
                if error.status != 404:
                    raise
                # Jenkins forgets an item five minutes after it left the queue
                found = self.find(waiting.job, waiting.run_id)
                if isinstance(found, Build):
                    return found
                raise SubmitError(
                    f"the build of run {waiting.run_id} is neither in the queue nor among the last "
                    f"{_MAX_BUILDS} builds of {waiting.job}"
                ) from None
            if item.get("cancelled"):
                raise SubmitError(f"somebody cancelled the build of run {waiting.run_id}", kind="cancelled")
            if item.get("executable"):
                return self._build(waiting.job, item["executable"]["number"])
            why = str(item.get("why") or "")
            if why != said:
                say(why)
                said = why
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"the build of run {waiting.run_id} is still in the queue after "
                    f"{timeout_seconds:.0f} s: {why}",
                    hint="it starts when it can",
                )
            time.sleep(self._poll_seconds)

    def follow_log(self, build: Build, offset: int = 0) -> Iterator[tuple[bytes, int]]:
        """New text of the build's log and the offset after it, until the log is complete. A controller that
        restarts meanwhile is waited for; a log that became shorter is read again from its start."""
        path = f"{job_path(build.job)}/{build.number}/logText/progressiveText"
        while True:
            answer = self._ask("GET", f"{path}?start={offset}", patience_seconds=RESTART_SECONDS)
            try:
                size = int(answer.headers.get("X-Text-Size", ""))
            except ValueError:
                raise SubmitError("the answer is no log of a Jenkins", where=self._access.url) from None
            if size < offset:
                yield b"(the log was cut in Jenkins; what is left of it follows)\n", 0
            offset = size
            if answer.data:
                yield answer.data, offset
            if answer.headers.get("X-More-Data") != "true":
                return
            if not answer.data:
                time.sleep(self._poll_seconds)

    def result(self, build: Build, timeout_seconds: float = 60.0) -> str:
        """SUCCESS, UNSTABLE, FAILURE, ABORTED or NOT_BUILT of a build whose log is complete."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            found = self._get(
                f"{job_path(build.job)}/{build.number}", "building,result", patience_seconds=RESTART_SECONDS
            )
            if not found.get("building") and found.get("result"):
                return str(found["result"])
            if time.monotonic() > deadline:
                raise SubmitError(f"has no result after {timeout_seconds:.0f} s", where=build.url)
            time.sleep(self._poll_seconds)

    def stop(self, target: Waiting | Build) -> None:
        """Aborts the build, or takes it out of the queue. Asking twice does no harm, so it is asked again
        when the answer was lost."""
        for attempt in (1, 2):
            try:
                if isinstance(target, Build):
                    self._post(f"{job_path(target.job)}/{target.number}/stop", redirects=True)
                else:
                    self._post(f"queue/cancelItem?id={target.item}", redirects=True)
            except _LostError as error:
                if attempt == 2:
                    raise SubmitError(f"did not answer: {error}", where=self._access.url) from None
            else:
                return

    # What a trigger needs

    def _check(self, job: str, parameters: Mapping[str, str]) -> None:
        found = self._get(job_path(job), "property[parameterDefinitions[name,type]]")
        known = [
            definition["name"]
            for prop in found.get("property") or ()
            for definition in prop.get("parameterDefinitions") or ()
        ]
        missing = sorted(set(parameters) - set(known))  # Jenkins would drop them without a word
        if missing:
            raise SubmitError(
                f"the job {job} has no parameter {', '.join(missing)}; it has {', '.join(known) or 'none'}",
                hint="a job knows the parameters of its Jenkinsfile after its first build",
                kind="input",
            )

    def _find_lost(self, job: str, run_id: str, why: str) -> Waiting | Build:
        deadline = time.monotonic() + self._lost_seconds
        while (found := self.find(job, run_id)) is None:
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"the answer to the trigger was lost ({why}), and no build of {job} with "
                    f"{RUN_ID}={run_id} showed up within {self._lost_seconds:.0f} s",
                    where=self._access.url,
                    hint="ask again with the same run id: a build that is there by then is adopted",
                )
            time.sleep(self._poll_seconds)
        return found

    def _build(self, job: str, number: int) -> Build:
        return Build(job, number, f"{self._access.url}/{job_path(job)}/{number}/")

    # HTTP

    def _get(self, path: str, tree: str, patience_seconds: float | None = None) -> dict[str, Any]:
        query = urlencode({"tree": tree})
        answer = self._ask("GET", f"{path}/api/json?{query}", patience_seconds=patience_seconds)
        return self._document(answer, path)

    def _document(self, answer: urllib3.BaseHTTPResponse, path: str) -> dict[str, Any]:
        try:
            found = json.loads(answer.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SubmitError("the answer is not from a Jenkins", where=f"{self._access.url}/{path}")
        return found

    def _ask(self, method: str, path: str, patience_seconds: float | None = None) -> urllib3.BaseHTTPResponse:
        """A question, which may be asked again."""
        deadline = time.monotonic() + (
            self._patience_seconds if patience_seconds is None else patience_seconds
        )
        while True:
            try:
                answer = self._send(method, path)
                if answer.status not in _BUSY or time.monotonic() > deadline:
                    return self._checked(answer, path)
            except _LostError as error:
                if time.monotonic() > deadline:
                    raise SubmitError(
                        f"cannot be reached: {error}", where=self._access.url, hint="check JENKINS_URL"
                    ) from None
            time.sleep(self._poll_seconds)

    def _post(self, path: str, body: str = "", *, redirects: bool = False) -> urllib3.BaseHTTPResponse:
        """Once; a second time only after a 403, which says that nothing was done, with a new crumb.
        `redirects`: whether success sends on to a page. Raises _LostError."""
        answer = self._send("POST", path, body)
        if answer.status == 403 and b"crumb" in answer.data.lower():
            self._renew_crumb()
            answer = self._send("POST", path, body)
        return answer if redirects and answer.status in (302, 303) else self._checked(answer, path)

    def _renew_crumb(self) -> None:
        """Bound to a session, whose cookie is kept with it."""
        self._crumb = {}
        answer = self._ask("GET", "crumbIssuer/api/json")
        found = self._document(answer, "crumbIssuer")
        cookies = SimpleCookie(answer.headers.get("Set-Cookie", ""))
        self._crumb = {found["crumbRequestField"]: found["crumb"]}
        if cookies:
            self._crumb["Cookie"] = "; ".join(f"{name}={morsel.value}" for name, morsel in cookies.items())

    def _send(self, method: str, path: str, body: str = "") -> urllib3.BaseHTTPResponse:
        headers = {**self._headers, **self._crumb}
        if method == "POST":
            # a connection that was kept may be closed by now, which would look like a lost answer
            self._http.clear()
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        try:
            return self._http.request(
                method,
                f"{self._access.url}/{path}",
                body=body.encode() if method == "POST" else None,
                headers=headers,
                redirect=False,
            )
        except urllib3.exceptions.HTTPError as error:
            raise _LostError(_plain(error)) from None

    def _checked(self, answer: urllib3.BaseHTTPResponse, path: str) -> urllib3.BaseHTTPResponse:
        if answer.status < 300:
            return answer
        where = f"{self._access.url}/{path.partition('?')[0]}"
        if answer.status < 400:
            target = urlsplit(answer.headers.get("Location", ""))
            raise JenkinsError(
                f"Jenkins sends on to {target.scheme}://{target.netloc}",
                answer.status,
                where=where,
                hint="set JENKINS_URL to its own address",
                kind="input",
            )
        words, hint, kind = _WORDS.get(
            answer.status,
            (f"answered {answer.status}, an error of its own", "look at Jenkins' log", "infrastructure"),
        )
        raise JenkinsError(
            f"Jenkins {words} ({answer.status})", answer.status, where=where, hint=hint, kind=kind
        )


def job_path(job: str) -> str:
    """`team/train` -> `job/team/job/train`. A branch `a/b` of a multibranch job is `team/train/a%2Fb`, as
    Jenkins names it."""
    return "/".join(f"job/{quote(part, safe='')}" for part in job.strip("/").split("/"))


def failure_of(result: str) -> Kind | None:
    """Whose fault a build's result is; None: it is none."""
    return _RESULTS.get(result, "failed")


def _run_id(found: Mapping[str, Any]) -> str | None:
    for action in found.get("actions") or ():
        for parameter in action.get("parameters") or ():
            if parameter.get("name") == RUN_ID:
                return str(parameter.get("value"))
    return None


def _plain(error: Exception) -> str:
    """urllib3 names the pool and the URL as well; the reason is enough."""
    return str(error.args[-1] if error.args else error).rpartition(": ")[2]
