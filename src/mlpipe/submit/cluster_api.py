"""Requests to a Kubernetes API server: plain dicts in and out, deadlines on all, errors in words.

Configuration (kubeconfig, exec plugins, client certificates, a pod's own token) is the kubernetes package's;
its model classes are not used: one costs 0.4 s to build, and their strictness changes between its majors.

The package has no default timeout and repeats no POST. Here every request is repeated until its deadline when
the server was away, overloaded or cut the answer off. That is safe since whatever we create has a name that
follows from what it is: the second POST meets the first's object as 409 (see `create_or_adopt`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import urllib3

from mlpipe._core.errors import Kind, SubmitError

SPEC_DIGEST = "mlpipe.dev/spec-digest"
DEADLINE_SECONDS = 60.0
_REQUEST_SECONDS = 20.0
_GONE_SECONDS = 120.0
_MAX_PAUSE_SECONDS = 5.0
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_TRANSIENT = (408, 429, 500, 502, 503, 504)
# kind -> path prefix and plural; these are all that mlpipe ever touches
_KINDS = {
    "ConfigMap": ("/api/v1", "configmaps"),
    "Service": ("/api/v1", "services"),
    "Pod": ("/api/v1", "pods"),
    "Event": ("/api/v1", "events"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
    "ResourceQuota": ("/api/v1", "resourcequotas"),
    "Job": ("/apis/batch/v1", "jobs"),
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "PodGroup": ("/apis/scheduling.volcano.sh/v1beta1", "podgroups"),
    "Workload": ("/apis/kueue.x-k8s.io/v1beta1", "workloads"),
}
Object = dict[str, Any]


class ApiError(SubmitError):
    """The server's answer, when it was not what was wanted. `status`: HTTP; 0 when there was no answer."""

    def __init__(self, message: str, *, status: int, hint: str | None = None, kind: Kind) -> None:
        super().__init__(message, hint=hint, kind=kind)
        self.status = status


class ClusterApi:
    """One API server, and the namespace in which everything of a run lies."""

    def __init__(self, configuration: Any, namespace: str) -> None:
        from kubernetes.client.rest import RESTClientObject

        self.namespace = namespace
        self.host: str = configuration.host
        self._configuration = configuration
        self._pool: urllib3.PoolManager = RESTClientObject(configuration).pool_manager

    def get(self, kind: str, name: str) -> Object | None:
        """None if there is no such object."""
        return self._request("GET", kind, name, absent_is_none=True)

    def list(self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "") -> list[Object]:
        query = {"limit": "500"}
        if labels:
            query["labelSelector"] = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
        if fields:
            query["fieldSelector"] = fields
        found: list[Object] = []
        while True:
            page = self._request("GET", kind, query=query) or {}
            found += page.get("items", [])
            query["continue"] = page.get("metadata", {}).get("continue", "")
            if not query["continue"]:
                return found

    def create(self, body: Object, *, dry_run: bool = False) -> Object:
        """Raises ApiError, with status 409 if the name is taken (perhaps by ourselves, when an answer was
        lost)."""
        query = {"dryRun": "All"} if dry_run else {}
        return self._request("POST", body["kind"], body=body, query=query) or {}

    def create_or_adopt(self, body: Object) -> tuple[Object, bool]:
        """The object as the server has it, and whether it is new. One of this name that is going away is
        waited for; one with another spec digest is refused, SubmitError (input)."""
        kind, name = body["kind"], body["metadata"]["name"]
        deadline = time.monotonic() + _GONE_SECONDS
        while True:
            try:
                return self.create(body), True
            except ApiError as error:
                if error.status != 409:
                    raise
            found = self.get(kind, name)
            if found is not None and "deletionTimestamp" not in found["metadata"]:
                ours = body["metadata"].get("annotations", {}).get(SPEC_DIGEST)
                if found["metadata"].get("annotations", {}).get(SPEC_DIGEST) != ours:
                    raise SubmitError(
                        f"{kind} {name} exists and was made from another spec",
                        where=f"namespace {self.namespace}",
                        hint=f"choose another --run-id, or look at it: kubectl -n {self.namespace} describe "
                        f"{kind.lower()} {name}",
                        kind="input",
                    )
                return found, False
            if time.monotonic() > deadline:
                raise SubmitError(
                    f"{kind} {name} of before is still being deleted after {_GONE_SECONDS:.0f} s",
                    where=f"namespace {self.namespace}",
                )
            time.sleep(0.2)

    def delete(self, kind: str, name: str, *, grace_seconds: int | None = None) -> None:
        """Asks for it, with all that it owns; no error if it is gone already."""
        body: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        self._request("DELETE", kind, name, body=body, absent_is_none=True)

    def patch(self, kind: str, name: str, body: Object) -> None:
        """A JSON merge patch; no error if the object is gone."""
        self._request("PATCH", kind, name, body=body, absent_is_none=True)

    def _request(
        self,
        method: str,
        kind: str,
        name: str = "",
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        absent_is_none: bool = False,
    ) -> Object | None:
        prefix, plural = _KINDS[kind]
        path = f"{prefix}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")
        url = f"{self.host}{path}" + (f"?{urlencode(query)}" if query else "")
        deadline = time.monotonic() + DEADLINE_SECONDS
        pause = 0.1
        while True:
            status, answer, retry_after = self._send(method, url, body)
            if 200 <= status < 300 and answer is not None:
                return answer
            if status == 404 and absent_is_none and name:
                return None
            transient = status == 0 or status in _TRANSIENT or (200 <= status < 300)
            if not transient or time.monotonic() > deadline:
                raise self._error(method, kind, name, status, answer)
            time.sleep(min(max(pause, retry_after), _MAX_PAUSE_SECONDS))
            pause *= 2

    def _send(self, method: str, url: str, body: Object | None) -> tuple[int, Object | None, float]:
        """Status (0: no answer), the JSON object of the answer (None: none that can be read), Retry-After."""
        headers = {"Accept": "application/json", "User-Agent": "mlpipe"}
        patching = "application/merge-patch+json" if method == "PATCH" else "application/json"
        if body is not None:
            headers["Content-Type"] = patching
        for setting in self._configuration.auth_settings().values():  # renews a token that has expired
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        try:
            response = self._pool.request(
                method,
                url,
                body=json.dumps(body).encode() if body is not None else None,
                headers=headers,
                timeout=_REQUEST_SECONDS,
                retries=False,
            )
        except urllib3.exceptions.HTTPError as error:
            return 0, {"message": _words(error)}, 0.0
        try:
            answer = json.loads(response.data)
        except ValueError:  # a proxy's page, or half a body
            answer = None
        wait = response.headers.get("Retry-After", "")
        return (
            response.status,
            answer if isinstance(answer, dict) else None,
            float(wait) if wait.isdigit() else 0.0,
        )

    def _error(self, method: str, kind: str, name: str, status: int, answer: Object | None) -> ApiError:
        verb = {"GET": "read", "POST": "create", "DELETE": "delete", "PATCH": "change"}[method]
        what = f"{verb} {kind} {name}".strip()
        said = (answer or {}).get("message") or "an answer that is no JSON"
        where = f"namespace {self.namespace}"
        if status == 0:
            return ApiError(
                f"the API server {self.host} cannot be reached: {said}",
                status=status,
                hint="is the cluster up, and KUBECONFIG the right one?",
                kind="infrastructure",
            )
        if status == 401:
            hint = "log in again: the token in your kubeconfig has expired"
            return ApiError(f"{self.host} does not know you (401)", status=status, hint=hint, kind="input")
        if status == 403:
            hint = "ask for the Role in k8s/base (docs/how-to/cluster-setup.md)"
            message = f"you may not {what} in {where} (403): {said}"
            return ApiError(message, status=status, hint=hint, kind="input")
        if status == 404 and kind == "JobSet" and not name:
            hint = "install JobSet, or write `kubernetes: {form: indexed-job}`"
            return ApiError("this cluster has no JobSet", status=status, hint=hint, kind="input")
        if status == 404:
            hint = f"make it (kubectl create namespace {self.namespace}) or choose another"
            message = f"cannot {what}: {said}"
            return ApiError(message, status=status, hint=hint, kind="input")
        transient = status in _TRANSIENT or status < 300
        return ApiError(
            f"cannot {what} in {where} ({status}): {said}",
            status=status,
            kind="infrastructure" if transient else "input",
        )


def connect(context: str | None = None, namespace: str | None = None) -> ClusterApi:
    """By the pod's own token where this is a pod that has one and KUBECONFIG is not set, else by the
    kubeconfig. `namespace`: default the context's, else "default". Raises SubmitError (input)."""
    from kubernetes import client, config
    from kubernetes.config.config_exception import ConfigException

    configuration = client.Configuration()
    try:
        if context is None and not os.environ.get("KUBECONFIG") and _NAMESPACE_FILE.exists():
            config.load_incluster_config(client_configuration=configuration)
            return ClusterApi(configuration, namespace or _NAMESPACE_FILE.read_text().strip())
        contexts, active = config.list_kube_config_contexts()
        known = {found["name"]: found.get("context") or {} for found in contexts}
        chosen = context or (active or {}).get("name", "")
        if chosen not in known:
            raise SubmitError(
                f"the kubeconfig has no context {chosen!r}",
                hint=f"it has {', '.join(sorted(known)) or 'none'}",
                kind="input",
            )
        config.load_kube_config(context=chosen, client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise SubmitError(
            f"no Kubernetes configuration: {error}",
            hint="set KUBECONFIG to your cluster's file",
            kind="input",
        ) from None
    return ClusterApi(configuration, namespace or known[chosen].get("namespace") or "default")


def _words(error: urllib3.exceptions.HTTPError) -> str:
    """Without urllib3's names of its own objects."""
    text = str(error.reason if isinstance(error, urllib3.exceptions.MaxRetryError) else error)
    return text.rpartition(">: ")[2] or type(error).__name__
