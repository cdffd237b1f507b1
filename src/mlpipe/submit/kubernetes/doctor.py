"""What a cluster lacks for runs, each thing with its remedy; asked as whoever calls, without changing it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, connect
from mlpipe.submit.submission import Finding, attempt

# what `submit`, `status` and `cancel` do, group, resource and verbs: the Role mlpipe-submitter in k8s/base
_RIGHTS = (
    ("batch", "jobs", ("get", "list", "create", "delete")),
    ("jobset.x-k8s.io", "jobsets", ("list", "delete")),
    ("", "pods", ("list", "delete")),
)
_USEFUL = (("", "events", ("list",)), ("kueue.x-k8s.io", "workloads", ("list",)))
_SETUP = "docs/how-to/cluster-setup.md"


def examine(context: str | None, namespace: str | None, store: Iterable[Finding]) -> Iterator[Finding]:
    """Up to the first thing without which nothing else can be told."""
    api = attempt("config", lambda: connect(context, namespace))
    if isinstance(api, Finding):
        yield api
        return
    yield Finding("config", "ok", f"context {api.context or 'of this pod'}, namespace {api.namespace}")
    version = attempt("server", lambda: api.request("GET", "/version", what="read the version"))
    if isinstance(version, Finding):
        yield version
        return
    yield Finding("server", "ok", f"{version.get('gitVersion', '?')} at {api.host}")
    yield _jobset(api)
    yield _kueue(api)
    yield _rights(api, "rights", _RIGHTS, "fail", f"have mlpipe-submitter bound to you ({_SETUP}, 3.)")
    yield _rights(api, "reasons", _USEFUL, "warn", "`status` cannot say all of why a run waits")
    yield _pod_security(api)
    for account in ("mlpipe-driver", "mlpipe-worker"):
        yield _account(api, account)
    yield from store


def _jobset(api: ClusterApi) -> Finding:
    path = "/apis/jobset.x-k8s.io/v1alpha2"
    group = _ask(api, "GET", path)
    if isinstance(group, dict):
        return Finding("jobset", "ok", "installed")
    if group.status == 404:
        remedy = "install JobSet, or write `kubernetes: {form: indexed-job}` in the pipeline file"
        return Finding("jobset", "warn", "this cluster has no JobSet", remedy)
    return Finding("jobset", "warn", f"cannot be told: {group.message}")


def _kueue(api: ClusterApi) -> Finding:
    """Whoever names no queue needs none."""
    version = attempt("kueue", api.kueue_version)
    if isinstance(version, Finding):
        return Finding("kueue", "warn", f"cannot be told: {version.detail}")
    detail = f"installed, {version}" if version else "none; a pipeline file that names a `queue` is refused"
    return Finding("kueue", "ok", detail)


def _rights(
    api: ClusterApi,
    name: str,
    rights: tuple[tuple[str, str, tuple[str, ...]], ...],
    level: Literal["warn", "fail"],
    remedy: str,
) -> Finding:
    """What the API server says that we may, asked without doing it."""
    missing = []
    for group, resource, verbs in rights:
        for verb in verbs:
            asked = {"namespace": api.namespace, "group": group, "resource": resource, "verb": verb}
            body = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": asked},
            }
            review = _ask(api, "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
            if not isinstance(review, dict):
                return Finding(name, level, f"cannot be told: {review.message}", review.hint)
            if not review.get("status", {}).get("allowed"):
                missing.append(f"{verb} {resource}")
    if missing:
        return Finding(name, level, f"you may not {', '.join(missing)} in {api.namespace}", remedy)
    return Finding(name, "ok", ", ".join(resource for _, resource, _ in rights))


def _pod_security(api: ClusterApi) -> Finding:
    """By the namespace's label; what the API server enforces where there is none, it does not tell."""
    namespace = _ask(api, "GET", f"/api/v1/namespaces/{api.namespace}")
    if not isinstance(namespace, dict):
        if namespace.status == 404:
            remedy = f"make it with k8s/base ({_SETUP}), or give --namespace"
            return Finding("namespace", "fail", f"there is no namespace {api.namespace}", remedy)
        return Finding("namespace", "ok", "you may not read its labels: its Pod Security level is not known")
    label = "pod-security.kubernetes.io/enforce"
    level = namespace["metadata"].get("labels", {}).get(label)
    if level is None:
        remedy = f"kubectl label namespace {api.namespace} {label}=restricted"
        return Finding("namespace", "warn", "enforces no Pod Security level of its own", remedy)
    detail = f"enforces Pod Security {level}"
    return Finding(
        "namespace", "ok", detail + ("" if level == "privileged" else "; no room for kubernetes.rdma")
    )


def _account(api: ClusterApi, name: str) -> Finding:
    account = _ask(api, "GET", f"/api/v1/namespaces/{api.namespace}/serviceaccounts/{name}")
    if isinstance(account, dict):
        return Finding(name, "ok", "the ServiceAccount is there")
    if account.status == 404:
        key = "kubernetes.driver_service_account" if name == "mlpipe-driver" else "kubernetes.service_account"
        remedy = f"apply k8s/base ({_SETUP}), or name another as {key}"
        return Finding(name, "fail", "there is no such ServiceAccount", remedy)
    return Finding(name, "ok", "you may not look for the ServiceAccount; a run would say if it is missing")


def _ask(
    api: ClusterApi, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | ApiError:
    """The answer, or what kept it away."""
    try:
        return api.request(method, path, what=f"read {path.rpartition('/')[2]}", body=body)
    except ApiError as error:
        return error
