"""How a Jenkins is talked to: as whom, with which crumb, what may be asked twice, and its errors in words.

Addresses in answers are not followed: Jenkins makes them from its own configured URL, and credentials go to
JENKINS_URL alone.

Sources: jenkins.io (CSRF protection, remote access API).
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode, urlsplit

import urllib3

from mlpipe._core.errors import Kind, SubmitError

PATIENCE_SECONDS = 30.0  # for an answer to a question that may be asked again
_TIMEOUT = urllib3.Timeout(connect=10.0, read=30.0)
_BUSY = (500, 502, 503, 504)
_WORDS: dict[int, tuple[str, str, Kind]] = {
    401: ("does not know this user or token", "check JENKINS_USER_ID and JENKINS_API_TOKEN", "input"),
    403: ("knows the user and does not allow this", "it needs Job/Read, Job/Build, Job/Cancel", "input"),
    404: ("has no such job or build", "check FOLDER/JOB, and that the user has Job/Read", "input"),
    409: ("does not build this job: it is disabled", "enable it in Jenkins", "input"),
}  # fmt: skip


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


class JenkinsError(SubmitError):
    """`status`: of the answer."""

    def __init__(self, message: str, status: int, *, where: str, hint: str, kind: Kind) -> None:
        super().__init__(message, where=where, hint=hint, kind=kind)
        self.status = status


class LostError(Exception):
    """No answer came, or half of one: what was asked may have been done."""


class JenkinsHttp:
    """`poll_seconds`: between two looks. `patience_seconds`: for an answer to a question."""

    def __init__(self, access: Access, *, poll_seconds: float, patience_seconds: float) -> None:
        self._access = access
        self._poll_seconds = poll_seconds
        self._patience_seconds = patience_seconds
        self._http = urllib3.PoolManager(timeout=_TIMEOUT, retries=False)
        self._headers: dict[str, str] = {}
        if access.user is not None:
            pair = base64.b64encode(f"{access.user}:{access.token}".encode()).decode()
            self._headers["Authorization"] = f"Basic {pair}"
        self._crumb: dict[str, str] = {}

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
            except LostError as error:
                if time.monotonic() > deadline:
                    raise SubmitError(
                        f"cannot be reached: {error}", where=self._access.url, hint="check JENKINS_URL"
                    ) from None
            time.sleep(self._poll_seconds)

    def _post(self, path: str, body: str = "", *, redirects: bool = False) -> urllib3.BaseHTTPResponse:
        """Once; a second time only after a 403, which says that nothing was done, with a new crumb.
        `redirects`: whether success sends on to a page. Raises LostError."""
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
            raise LostError(_plain(error)) from None

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


def _plain(error: Exception) -> str:
    """urllib3 names the pool and the URL as well; the reason is enough."""
    return str(error.args[-1] if error.args else error).rpartition(": ")[2]
