"""Requests to a Kubernetes API server: plain dicts in and out, deadlines on all, errors in words.

Configuration (kubeconfig, exec plugins, client certificates, a pod's own token) is the kubernetes package's;
its model classes are not used: one costs 0.4 s to build, and their strictness changes between its majors.

The package has no default timeout and repeats no POST. Here every request is repeated until its deadline when
the server was away, overloaded or cut the answer off. That is safe since whatever we create has a name that
follows from what it is: the second POST meets the first's object as 409 (see `create_or_adopt`).
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import urllib3

from mlpipe._core.errors import ErrorKind, SubmitError
from mlpipe._core.retry import FIRST_PAUSE_SECONDS, AwayError, Tries
from mlpipe.render.names import PIPELINE_DIGEST, SPEC_DIGEST, VERSION
from mlpipe.submit.kubernetes.config import configuration_errors, find_cluster

DEADLINE_SECONDS = 60.0  # of one request with all its repetitions
_REQUEST_SECONDS = 20.0  # of one try: to connect, and between two pieces of the answer
_WATCH_SECONDS = 300  # until the server ends a watch
_SILENCE_SECONDS = 90.0  # in which a watch has no sign of life: it was cut off
_GONE_SECONDS = 120.0  # for an object that is being deleted to be gone
_TRANSIENT = (0, 408, 429, 500, 502, 503, 504)
_NO_TRUST = -1  # our own "status" of a certificate or an address that will not get better
_HEADERS = {"Accept": "application/json", "User-Agent": "mlpipe"}
# kind -> group and version, and plural; these are all that a run touches
_KINDS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "Job": ("/apis/batch/v1", "jobs"),
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "ResourceClaimTemplate": ("/apis/resource.k8s.io/v1", "resourceclaimtemplates"),
    "TrainJob": ("/apis/trainer.kubeflow.org/v1alpha1", "trainjobs"),
    "PodGroup": ("/apis/scheduling.volcano.sh/v1beta1", "podgroups"),
    "Workload": ("/apis/kueue.x-k8s.io/{kueue}", "workloads"),
}
# The newest first: Kueue 0.15 brought it, 0.20 serves only that. What mlpipe reads is the same in both.
_KUEUE_VERSIONS = ("v1beta2", "v1beta1")
NO_KUEUE = "this cluster has no Kueue", "install it (kueue.sigs.k8s.io), or take `kubernetes.queue` out"
Object = dict[str, Any]


class ApiError(SubmitError):
    """The server's answer, when it was not what was wanted. `status`: HTTP; 0 or less: there was none.
    `repeated`: it is not the first answer; the one to a try before may have been lost."""

    def __init__(self, message: str, *, status: int, hint: str | None = None, kind: ErrorKind) -> None:
        super().__init__(message, hint=hint, kind=kind)
        self.status = status
        self.repeated = False


def is_away(error: SubmitError) -> bool:
    """Whether the server did not say what it makes of the request: it was away or busy. Also where a token
    has expired (401): it is read again, and renewed for a pod."""
    return isinstance(error, ApiError) and (error.status in (401, *_TRANSIENT) or 200 <= error.status < 300)


class ClusterApi:
    """One API server, and the namespace in which everything of a run lies. `context`: of the kubeconfig; None
    by a pod's own token."""

    def __init__(self, configuration: Any, namespace: str, context: str | None = None) -> None:
        from kubernetes.client.rest import RESTClientObject

        self.namespace = namespace
        self.context = context
        self.host: str = configuration.host
        self.deadline_seconds = math.inf  # of a request, where nobody waits for DEADLINE_SECONDS
        self._configuration = configuration
        self._pool: urllib3.PoolManager = RESTClientObject(configuration).pool_manager

    def get(self, kind: str, name: str) -> Object | None:
        """None if there is no such object."""
        try:
            return self.request("GET", self._path(kind, name), what=f"read {kind} {name}")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def snapshot(
        self, kind: str, labels: Mapping[str, str] | None = None, fields: str = ""
    ) -> tuple[list[Object], str]:
        """All of them, and the version of the list, from which `watch` goes on."""
        query = {"limit": "500", **_selectors(labels, fields)}
        objects: list[Object] = []
        while True:
            try:
                page = self.request("GET", self._path(kind), what=f"list {kind}s", query=query)
            except ApiError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                del query["continue"], query["limit"]  # the pages grew too old: all at once, from the start
                objects = []
                continue
            objects += page.get("items") or []
            about = page.get("metadata", {})
            query["continue"] = about.get("continue", "")
            if not query["continue"]:
                return objects, about.get("resourceVersion", "")

    def watch(
        self, kind: str, labels: Mapping[str, str], version: str, opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[tuple[str, Object]]:
        """ADDED, MODIFIED or DELETED, and the object, for every change since `version`. Ends when the server
        ends it, and when anything goes wrong: a new `snapshot` tells what. `opened` is told how another
        thread ends it."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(_WATCH_SECONDS),
            "allowWatchBookmarks": "true",  # a sign of life every minute
            **_selectors(labels),
        }
        timeout = urllib3.Timeout(connect=_REQUEST_SECONDS, read=_SILENCE_SECONDS)
        rest = b""
        try:
            with self._pool.request(
                "GET",
                f"{self.host}{self._path(kind)}?{urlencode(query)}",
                headers={**_HEADERS, **self._credentials()},
                timeout=timeout,
                retries=False,
                preload_content=False,
            ) as response:
                if response.status != 200:
                    return
                opened(response.shutdown)
                for chunk in response.stream():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for event in map(json.loads, filter(None, lines)):
                        if event["type"] == "ERROR":
                            return
                        if event["type"] != "BOOKMARK":
                            yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError, ValueError):
            return

    def list(self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "") -> list[Object]:
        return self.snapshot(kind, labels, fields)[0]

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        """Raises ApiError, with status 409 if the name is taken (perhaps by ourselves, when an answer was
        lost)."""
        kind = body["kind"]
        return self.request(
            "POST",
            self._path(kind),
            what=f"create {kind} {body['metadata']['name']}",
            query=_dry_run(kind) if dry_run else {},
            body=body,
        )

    def create_or_adopt(self, body: Object) -> tuple[Object, bool]:
        """The object as the server has it, and whether it is new, as far as can be told. A refusal is none if
        it is there already: a quota or a policy may speak before its name is looked at. One of this name that
        is going away is waited for; one with another spec digest is refused, SubmitError (input), unless it
        was made from the same pipeline by another version of mlpipe."""
        kind, name = body["kind"], body["metadata"]["name"]
        deadline = time.monotonic() + _GONE_SECONDS
        while True:
            try:
                return self.create(body), True
            except ApiError as error:
                if is_away(error):
                    raise
                refusal = error
            existing = self._look(kind, name) if refusal.status != 409 else self.get(kind, name)
            if refusal.status != 409 and (existing is None or not is_same(existing, body)):
                raise refusal
            if existing is not None and "deletionTimestamp" not in existing["metadata"]:
                if not is_same(existing, body):
                    raise SubmitError(
                        f"{kind} {name} exists and was made from another spec",
                        where=f"namespace {self.namespace}",
                        hint=f"choose another --run-id, or look at it: kubectl -n {self.namespace} describe "
                        f"{kind.lower()} {name}",
                        kind="input",
                    )
                return existing, refusal.repeated
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"{kind} {name} of before is still being deleted after {_GONE_SECONDS:.0f} s",
                    where=f"namespace {self.namespace}",
                    hint=f"see what holds it: kubectl -n {self.namespace} get {kind.lower()} {name} -o yaml",
                )
            time.sleep(FIRST_PAUSE_SECONDS)

    def _look(self, kind: str, name: str) -> Object | None:
        """None also where one may not look."""
        try:
            return self.get(kind, name)
        except ApiError:
            return None

    def delete(
        self,
        kind: str,
        name: str,
        *,
        uid: str | None = None,
        grace_seconds: int | None = None,
        is_lost: bool = False,
    ) -> None:
        """Asks for it, with all that it owns; no error if it is gone already, and none with `uid` if another
        has its name by now. `is_lost`: what it owns may never go."""
        # A TrainJob that waited for its JobSet to go would be seen without it, and be given another.
        policy = "Background" if kind == "TrainJob" or is_lost else "Foreground"
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": policy}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            self._change("DELETE", kind, name, body, "delete")
        except ApiError as error:
            if uid is None or error.status != 409:
                raise

    def patch(self, kind: str, name: str, body: Object) -> None:
        """A JSON merge patch; no error if the object is gone."""
        self._change("PATCH", kind, name, body, "change")

    def _change(self, method: str, kind: str, name: str, body: Object, verb: str) -> None:
        try:
            self.request(method, self._path(kind, name), what=f"{verb} {kind} {name}", body=body)
        except ApiError as error:
            if error.status != 404:
                raise

    def kueue_version(self) -> str | None:
        """Of Kueue's API, as this server serves it now; None if there is no Kueue. Raises ApiError."""
        try:
            group = self.request("GET", "/apis/kueue.x-k8s.io", what="look for Kueue")
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        served = [version["version"] for version in group["versions"]]
        return next((one for one in _KUEUE_VERSIONS if one in served), served[0])

    def _path(self, kind: str, name: str = "") -> str:
        prefix, plural = _KINDS[kind]
        if "{kueue}" in prefix:
            prefix = prefix.format(kueue=self.kueue_version() or _KUEUE_VERSIONS[0])
        return f"{prefix}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def request(
        self,
        method: str,
        path: str,
        *,
        what: str,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
    ) -> Object:
        """The answer to one request, repeated until its deadline while the server is away or busy.
        `what`: for the message, such as "read Job a". Raises ApiError."""
        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        tries = Tries(min(DEADLINE_SECONDS, self.deadline_seconds), first_pause_seconds=FIRST_PAUSE_SECONDS)
        while True:
            status, answer, retry_after = self._send(method, url, body)
            succeeded = 200 <= status < 300
            if succeeded and answer is not None:
                return answer
            error = self._error(what, status, answer)
            error.repeated = tries.ambiguous
            away = AwayError(error.message, applied=True, retry_after_seconds=retry_after)
            if not (succeeded or status in _TRANSIENT) or not tries.again(away):
                raise error

    def _send(self, method: str, url: str, body: Object | None) -> tuple[int, Object | None, float]:
        """Status (0 or less: no answer), the JSON object of the answer (None: none that can be read),
        Retry-After in seconds."""
        headers = dict(_HEADERS)
        if body is not None:
            kind = "merge-patch+json" if method == "PATCH" else "json"
            headers["Content-Type"] = f"application/{kind}"
        try:
            headers.update(self._credentials())
            response = self._pool.request(
                method,
                url,
                body=json.dumps(body).encode() if body is not None else None,
                headers=headers,
                timeout=min(_REQUEST_SECONDS, self.deadline_seconds),
                retries=False,
            )
        except (urllib3.exceptions.SSLError, urllib3.exceptions.LocationValueError, OSError) as error:
            return _NO_TRUST, {"message": _words(error)}, 0.0  # OSError: of certificate files
        except urllib3.exceptions.HTTPError as error:
            return 0, {"message": _words(error)}, 0.0
        try:
            answer = json.loads(response.data)
        except ValueError:  # a proxy's page, or a path that the server does not know
            answer = None
        wait = response.headers.get("Retry-After", "")
        readable = answer if isinstance(answer, dict) else None
        return response.status, readable, float(wait) if wait.isdecimal() else 0.0

    def _credentials(self) -> dict[str, str]:
        """Headers; renews a token that has expired, as far as the kubeconfig says how."""
        with configuration_errors():
            settings = self._configuration.auth_settings().values()
        return {
            setting["key"]: setting["value"]
            for setting in settings
            if setting["in"] == "header" and setting["value"]
        }

    def _error(self, what: str, status: int, answer: Object | None) -> ApiError:
        """`answer` None: not JSON, and nothing that the API server itself would say."""
        said = str((answer or {}).get("message") or "an answer that is no JSON")
        where = f"namespace {self.namespace}"
        hint: str | None = None
        kind: ErrorKind = "input"
        if status == 0:
            message = f"the API server {self.host} cannot be reached: {said}"
            hint, kind = "is the cluster up, and KUBECONFIG the right one?", "infrastructure"
        elif status == _NO_TRUST:
            message = f"no safe connection to the API server {self.host}: {said}"
            hint = "look at `server` and `certificate-authority-data` in the kubeconfig"
        elif status == 401:
            message = f"{self.host} does not know you (401)"
            hint = "log in again: the token or certificate in your kubeconfig has expired or is another's"
        elif status == 403 and " cannot " in said:
            message = f"you may not {what} in {where} (403): {said}"
            hint = "ask for the Role in k8s/base (docs/how-to/cluster-setup.md)"
        elif status == 403 and "exceeded quota" in said:
            message = f"no room to {what} in {where} (403): {said}"
            hint, kind = "wait for other runs, or have the namespace's quota raised", "infrastructure"
        elif status == 404 and answer is None:
            message = f"cannot {what}: this cluster does not know that kind of object (404)"
            if "TrainJob" in what:
                message = f"cannot {what}: this cluster has no Kubeflow Trainer 2 (404)"
                hint = "install it (kubeflow.org), or choose another kubernetes.form"
            elif "JobSet" in what:
                message = f"cannot {what}: this cluster has no JobSet (404)"
                hint = "install JobSet, or write `kubernetes: {form: indexed-job}`"
        elif status == 404 and said.startswith("namespaces "):
            message = f"cannot {what}: {said}"
            hint = f"make it (kubectl create namespace {self.namespace}) or choose another"
        else:
            message = f"cannot {what} in {where} ({status}): {said}"
            if "ValidatingAdmissionPolicy" in said:
                hint = "a rule of this cluster: keep to it, or ask who set it"
            if status in _TRANSIENT or status < 300:
                kind = "infrastructure"
        return ApiError(message, status=status, hint=hint, kind=kind)


def _dry_run(kind: str) -> dict[str, str]:
    """A field that another Trainer has would be dropped, and the pods lack what it says."""
    return {"dryRun": "All", **({"fieldValidation": "Strict"} if kind == "TrainJob" else {})}


def _selectors(labels: Mapping[str, str] | None = None, fields: str = "") -> dict[str, str]:
    labelled = {"labelSelector": ",".join(f"{key}={value}" for key, value in sorted((labels or {}).items()))}
    return {name: value for name, value in {**labelled, "fieldSelector": fields}.items() if value}


def is_same(existing: Object, body: Object) -> bool:
    """The very same; or what another version, which may render it differently, made of the same pipeline."""
    theirs, ours = (one["metadata"].get("annotations") or {} for one in (existing, body))
    versions = {(one["metadata"].get("labels") or {}).get(VERSION) for one in (existing, body)}
    same = PIPELINE_DIGEST if len(versions) == 2 else SPEC_DIGEST
    return bool(ours[same] == theirs.get(same))


def connect(context: str | None = None, namespace: str | None = None) -> ClusterApi:
    """By the pod's own token where this is a pod that has one and KUBECONFIG is not set, else by the
    kubeconfig. `namespace`: default the context's, else "default". Raises SubmitError (input)."""
    return ClusterApi(*find_cluster(context, namespace))


def _words(error: Exception) -> str:
    """Without urllib3's names of its own objects."""
    cause = error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error
    text = str(cause)
    return re.sub(r"^(<[^>]*>|HTTPS?Connection(Pool)?\([^)]*\)): ", "", text) or type(cause).__name__
