"""How a Jenkins is talked to. python-jenkins carries the login, the crumbs, the folders in addresses and the
calls; what may be asked twice, and what an error means, stands here (docs/adr/0011 says why).

Addresses in answers are not followed: Jenkins makes them from its own configured URL, and credentials go to
JENKINS_URL alone.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import jenkins
import requests

from mlpipe._core.errors import ErrorKind, SubmitError
from mlpipe._core.retry import AwayError, Tries

PATIENCE_SECONDS = 30.0  # for an answer to a question that may be asked again
_TIMEOUT_SECONDS = 10.0, 30.0  # to connect; between two pieces of an answer
_BUSY = (500, 502, 503, 504)
_WORDS: dict[int, tuple[str, str, ErrorKind]] = {
    401: ("does not know this user or token", "check JENKINS_USER_ID and JENKINS_API_TOKEN", "input"),
    403: ("knows the user and does not allow this", "it needs Job/Read, Job/Build, Job/Cancel", "input"),
    404: ("has no such job or build", "check FOLDER/JOB, and that the user has Job/Read", "input"),
    409: ("does not build this job: it is disabled", "enable it in Jenkins", "input"),
}  # fmt: skip
T = TypeVar("T")


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
    """`status`: of the answer. `wants_crumb`: it was refused for want of a crumb, and nothing was done."""

    def __init__(
        self, message: str, status: int, *, where: str, hint: str, kind: ErrorKind, wants_crumb: bool = False
    ) -> None:
        super().__init__(message, where=where, hint=hint, kind=kind)
        self.status = status
        self.wants_crumb = wants_crumb


class LostError(AwayError):
    """No answer came, or half of one: what was asked may have been done."""

    def __init__(self, message: str) -> None:
        super().__init__(message, applied=True)


class _SystemTrust(requests.adapters.HTTPAdapter):
    """Trusts whom this machine trusts (and SSL_CERT_FILE names), as all else here does."""

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, ssl_context=ssl.create_default_context(), **kwargs)


class _Client(jenkins.Jenkins):  # type: ignore[misc]
    """python-jenkins, less what its surroundings could make of it: it takes no credentials, proxies or
    switches for TLS from them, and follows no redirect."""

    def __init__(self, access: Access) -> None:
        # it writes the value of this variable, headers with credentials in them, into the log
        headers = os.environ.pop("JENKINS_API_EXTRA_HEADERS", None)
        try:
            super().__init__(access.url, access.user, access.token, timeout=_TIMEOUT_SECONDS)
        finally:
            if headers is not None:
                os.environ["JENKINS_API_EXTRA_HEADERS"] = headers
        self._session.trust_env = False
        self._session.verify = True
        self._session.max_redirects = 0
        self._session.mount("https://", _SystemTrust())

    def hang_up(self) -> None:
        """A connection that was kept may be closed by now, which would look like a lost answer."""
        self._session.close()


class JenkinsHttp:
    """`poll_seconds`: between two looks. `patience_seconds`: for an answer to a question."""

    def __init__(self, access: Access, *, poll_seconds: float, patience_seconds: float) -> None:
        self._access = access
        self._poll_seconds = poll_seconds
        self._patience_seconds = patience_seconds
        self._client = _Client(access)

    def _ask(self, path: str, ask: Callable[[], T], patience_seconds: float | None = None) -> T:
        """The answer of a call that may be made again. `path`: for messages."""
        seconds = self._patience_seconds if patience_seconds is None else patience_seconds
        first = min(self._poll_seconds, 0.1)
        tries = Tries(seconds, first_pause_seconds=first, max_pause_seconds=self._poll_seconds)
        while True:
            try:
                return self._call(path, ask)
            except LostError as error:
                if not tries.again(error):
                    raise SubmitError(
                        f"cannot be reached: {error} {tries}",
                        where=self._access.url,
                        hint="check JENKINS_URL",
                    ) from None
            except JenkinsError as error:
                if error.status not in _BUSY or not tries.again(AwayError(error.message, applied=False)):
                    raise

    def _ask_for_json(
        self, path: str, ask: Callable[[], Any], patience_seconds: float | None = None
    ) -> dict[str, Any]:
        document = self._ask(path, ask, patience_seconds)
        if not isinstance(document, dict):
            raise self._stranger(path)
        return document

    def _post(self, path: str, post: Callable[[], T]) -> T:
        """The answer of a call that is made once; a second time only when it was refused for want of a crumb,
        which says that nothing was done. Raises LostError."""
        for last in (False, True):
            self._ask("crumbIssuer", lambda: self._client.maybe_add_crumb(requests.Request("POST", "")))
            self._client.hang_up()
            try:
                return self._call(path, post)
            except JenkinsError as error:
                if last or not error.wants_crumb:
                    raise
            self._client.crumb = None  # it was of a session that is over
        raise AssertionError("unreachable")

    def _call(self, path: str, call: Callable[[], T]) -> T:
        """One call of python-jenkins. Its errors do not tell a refusal from a server that is away; the answer
        that they were made of does."""
        try:
            return call()
        except (jenkins.JenkinsException, requests.RequestException, ValueError, KeyError) as error:
            failures = [one for one in _chain(error) if isinstance(one, requests.RequestException)]
            answers = [one.response for one in failures if one.response is not None]
            if answers:
                raise self._refusal(path, answers[0]) from None
            if failures:
                raise LostError(_plain(failures[0])) from None
            raise self._stranger(path) from None

    def _stranger(self, path: str) -> SubmitError:
        return SubmitError("the answer is not from a Jenkins", where=f"{self._access.url}/{path}")

    def _refusal(self, path: str, answer: Any) -> JenkinsError:
        where, status = f"{self._access.url}/{path}", answer.status_code
        if status < 400:
            target = urlsplit(answer.headers.get("Location", ""))
            words = f"Jenkins sends on to {target.scheme}://{target.netloc}"
            return JenkinsError(
                words, status, where=where, hint="set JENKINS_URL to its own address", kind="input"
            )
        words, hint, kind = _WORDS.get(
            status, (f"answered {status}, an error of its own", "look at Jenkins' log", "infrastructure")
        )
        wants_crumb = status == 403 and b"crumb" in answer.content.lower()
        return JenkinsError(
            f"Jenkins {words} ({status})", status, where=where, hint=hint, kind=kind, wants_crumb=wants_crumb
        )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _plain(error: Exception) -> str:
    """The innermost reason: requests and urllib3 each wrap it, with the pool and the URL."""
    cause = error
    while isinstance(inner := getattr(cause, "reason", None) or (cause.args or (None,))[-1], Exception):
        cause = inner
    return str(cause).rpartition(": ")[2]
