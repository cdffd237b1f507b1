"""`mlpipe doctor`: what this machine, the store and a cluster lack, each with its remedy."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from mlpipe._core.errors import EXIT_CODES, MlpipeError
from mlpipe._core.units import format_bytes
from mlpipe.cli.session import Session, shared

if TYPE_CHECKING:
    from mlpipe.submit.kubernetes.api import ApiError, ClusterApi

T = TypeVar("T")
_MEMORY_FLOOR_BYTES = 2 * 2**30
_DISK_FLOOR_BYTES = 5 * 2**30
# what `submit`, `status` and `cancel` do, group, resource and verbs: the Role mlpipe-submitter in k8s/base
_RIGHTS = (
    ("batch", "jobs", ("get", "list", "create", "delete")),
    ("jobset.x-k8s.io", "jobsets", ("list", "delete")),
    ("", "pods", ("list", "delete")),
)
_USEFUL = (("", "events", ("list",)), ("kueue.x-k8s.io", "workloads", ("list",)))
_SETUP = "docs/how-to/cluster-setup.md"
_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@dataclass(frozen=True)
class Finding:
    """`fail` keeps mlpipe from training here; `warn` takes something away."""

    name: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    remedy: str | None = None


@click.command()
@click.option(
    "--for",
    "target",
    type=click.Choice(["kubernetes", "s3-policy"]),
    help="A cluster, not this machine; or print the policy that keys of the store need.",
)
@click.option("--context", metavar="NAME", help="Of the kubeconfig. Default: its current one.")
@click.option("--namespace", metavar="NAME", help="Default: the context's.")
@click.option(
    "--of",
    "who",
    type=click.Choice(["worker", "driver"]),
    help="Of the policy; a driver's is a submitter's, too.",
)
@click.option("--run", "run_id", metavar="RUN", help="Of a worker's policy. Default: every run of the store.")
@shared
@click.pass_obj
def command(
    session: Session,
    target: str | None,
    context: str | None,
    namespace: str | None,
    who: Literal["worker", "driver"] | None,
    run_id: str | None,
) -> int:
    """Say what this machine and the store lack, or with --for a cluster and the store, each with its remedy.

    Exits 0 when a pipeline can be trained there, else 4.

    `--for s3-policy --of worker|driver` prints the IAM policy document for the keys of the store.
    """
    if target != "kubernetes" and (context is not None or namespace is not None):
        raise click.UsageError("--context and --namespace are for --for kubernetes")
    if (target == "s3-policy") != (who is not None) or (who is None and run_id is not None):
        raise click.UsageError("--of worker|driver and --run are for --for s3-policy, which needs --of")
    if who is not None:
        return _policy(session, who, run_id)
    findings = list(examine(session) if target is None else examine_cluster(session, context, namespace))
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        word, colour = _MARKS[finding.level]
        lines.append(
            f"{click.style(word.ljust(4), fg=colour)}  {finding.name.ljust(width)}  {finding.detail}"
        )
        if finding.remedy:
            lines.append(f"{'':{width + 8}}-> {finding.remedy}")
    failed = any(finding.level == "fail" for finding in findings)
    session.result({"usable": not failed, "findings": [asdict(f) for f in findings]}, "\n".join(lines))
    return EXIT_CODES["infrastructure"] if failed else 0


def _policy(session: Session, who: Literal["worker", "driver"], run_id: str | None) -> int:
    from mlpipe.store.s3_policy import policy

    document = policy(session.full_store_url(), who, run_id)
    session.result(document, json.dumps(document, indent=2))
    return 0


def examine(session: Session) -> Iterator[Finding]:
    yield _python()
    yield _torch()
    yield _cores()
    yield _memory()
    yield _gpus()
    yield _compiler()
    yield from _store(session)


def _python() -> Finding:
    detail = f"{platform.python_version()} at {sys.executable}"
    if platform.system() != "Linux":
        return Finding("python", "fail", f"{detail} on {platform.system()}", "mlpipe runs on Linux")
    return Finding("python", "ok", detail)


def _torch() -> Finding:
    """By the package's metadata: importing torch takes seconds."""
    try:
        return Finding("torch", "ok", version("torch"))
    except PackageNotFoundError:
        return Finding(
            "torch",
            "fail",
            "not installed: pipelines can be planned and submitted from here, not trained",
            "pip install 'mlpipe[train]'",
        )


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Finding("cores", "warn", str(cores), "two workers on one core take turns: use nproc 1")
    return Finding("cores", "ok", str(cores))


def _memory() -> Finding:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        total = min(total, int(text))
    if total < _MEMORY_FLOOR_BYTES:
        return Finding("memory", "warn", format_bytes(total), "a worker needs about 1 GiB: use nproc 1")
    return Finding("memory", "ok", format_bytes(total))


def _gpus() -> Finding:
    from mlpipe.submit.local import gpu_ids

    gpus = gpu_ids()
    return Finding("gpus", "ok", f"{len(gpus)}" if gpus else "none; training runs on the CPU")


def _compiler() -> Finding:
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return Finding("compiler", "ok", found)
    return Finding(
        "compiler",
        "warn",
        "no C++ compiler: `compile` cannot be used on the CPU",
        "apt-get install g++, or leave `compile: off`",
    )


def _store(session: Session) -> Iterator[Finding]:
    url = session.store_url or "./runs"
    store = _attempt("store", lambda: session.open_store())
    if isinstance(store, Finding):
        yield store
        return
    problem = _attempt("store", store.probe)
    if isinstance(problem, Finding):
        yield problem
        return
    yield Finding("store", "ok", f"{url}: writes, reads and conditional writes work")
    folder = store.local_path("runs")
    if folder is not None:
        folder = folder.parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        level: Literal["ok", "warn"] = "ok" if free > _DISK_FLOOR_BYTES else "warn"
        remedy = None if level == "ok" else "free some, or give --store on another disk"
        yield Finding("disk", level, f"{format_bytes(free)} free in {folder}", remedy)


def _attempt(name: str, action: Callable[[], T]) -> T | Finding:
    try:
        return action()
    except MlpipeError as error:
        return Finding(name, "fail", str(error), error.hint)


def examine_cluster(session: Session, context: str | None, namespace: str | None) -> Iterator[Finding]:
    """Up to the first thing without which nothing else can be told."""
    from mlpipe.submit.kubernetes.api import connect

    api = _attempt("config", lambda: connect(context, namespace))
    if isinstance(api, Finding):
        yield api
        return
    yield Finding("config", "ok", f"context {api.context or 'of this pod'}, namespace {api.namespace}")
    found = _attempt("server", lambda: api.request("GET", "/version", what="read the version"))
    if isinstance(found, Finding):
        yield found
        return
    yield Finding("server", "ok", f"{found.get('gitVersion', '?')} at {api.host}")
    yield _jobset(api)
    yield _kueue(api)
    yield _rights(api, "rights", _RIGHTS, "fail", f"have mlpipe-submitter bound to you ({_SETUP}, 3.)")
    yield _rights(api, "reasons", _USEFUL, "warn", "`status` cannot say all of why a run waits")
    yield _pod_security(api)
    for account in ("mlpipe-driver", "mlpipe-worker"):
        yield _account(api, account)
    yield from _store(session)


def _jobset(api: ClusterApi) -> Finding:
    path = "/apis/jobset.x-k8s.io/v1alpha2"
    found = _ask(api, "GET", path)
    if isinstance(found, dict):
        return Finding("jobset", "ok", "installed")
    if found.status == 404:
        remedy = "install JobSet, or write `kubernetes: {form: indexed-job}` in the pipeline file"
        return Finding("jobset", "warn", "this cluster has no JobSet", remedy)
    return Finding("jobset", "warn", f"cannot be told: {found.message}")


def _kueue(api: ClusterApi) -> Finding:
    """Whoever names no queue needs none."""
    version = _attempt("kueue", api.kueue_version)
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
            found = _ask(api, "POST", "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", body)
            if not isinstance(found, dict):
                return Finding(name, level, f"cannot be told: {found.message}", found.hint)
            if not found.get("status", {}).get("allowed"):
                missing.append(f"{verb} {resource}")
    if missing:
        return Finding(name, level, f"you may not {', '.join(missing)} in {api.namespace}", remedy)
    return Finding(name, "ok", ", ".join(resource for _, resource, _ in rights))


def _pod_security(api: ClusterApi) -> Finding:
    """By the namespace's label; what the API server enforces where there is none, it does not tell."""
    found = _ask(api, "GET", f"/api/v1/namespaces/{api.namespace}")
    if not isinstance(found, dict):
        if found.status == 404:
            remedy = f"make it with k8s/base ({_SETUP}), or give --namespace"
            return Finding("namespace", "fail", f"there is no namespace {api.namespace}", remedy)
        return Finding("namespace", "ok", "you may not read its labels: its Pod Security level is not known")
    label = "pod-security.kubernetes.io/enforce"
    level = found["metadata"].get("labels", {}).get(label)
    if level is None:
        remedy = f"kubectl label namespace {api.namespace} {label}=restricted"
        return Finding("namespace", "warn", "enforces no Pod Security level of its own", remedy)
    detail = f"enforces Pod Security {level}"
    return Finding(
        "namespace", "ok", detail + ("" if level == "privileged" else "; no room for kubernetes.rdma")
    )


def _account(api: ClusterApi, name: str) -> Finding:
    found = _ask(api, "GET", f"/api/v1/namespaces/{api.namespace}/serviceaccounts/{name}")
    if isinstance(found, dict):
        return Finding(name, "ok", "the ServiceAccount is there")
    if found.status == 404:
        key = "kubernetes.driver_service_account" if name == "mlpipe-driver" else "kubernetes.service_account"
        remedy = f"apply k8s/base ({_SETUP}), or name another as {key}"
        return Finding(name, "fail", "there is no such ServiceAccount", remedy)
    return Finding(name, "ok", "you may not look for the ServiceAccount; a run would say if it is missing")


def _ask(
    api: ClusterApi, method: str, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any] | ApiError:
    """The answer, or what kept it away."""
    from mlpipe.submit.kubernetes.api import ApiError

    try:
        return api.request(method, path, what=f"read {path.rpartition('/')[2]}", body=body)
    except ApiError as error:
        return error
