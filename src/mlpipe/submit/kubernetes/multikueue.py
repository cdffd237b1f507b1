"""A queue of MultiKueue's: the Kueue of a manager cluster sends each gang to one of its worker clusters, and
copies the gang's status back, and nothing else. Pods, their events and their nodes are the worker's, where a
driver does not look: what became of a stage it reads in the store, as ever.

What is said here was seen with Kueue 0.17 (pkg/controller/admissionchecks/multikueue of
github.com/kubernetes-sigs/kueue).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render import names
from mlpipe.render.pod import GRACE_SECONDS
from mlpipe.store.base import Store
from mlpipe.submit.handle import outcome_keys
from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, Object, connect

CONTROLLER = "kueue.x-k8s.io/multikueue"
_OF_VOLUMES = {
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
    "secret": ("Secret", "secretName"),
}
_OF_ENV = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "name")}
_ASK_SECONDS = 20.0  # who has not been told where a gang is asks again
_WORKER_SECONDS = 10.0  # of a request to a worker cluster, before anything is sent there


def is_sent(gang: Object) -> bool:
    """Whether MultiKueue has it run in another cluster: Kueue's webhook marks it when it is made."""
    return bool(gang.get("spec", {}).get("managedBy") == CONTROLLER)


def is_ready(gang: Object) -> bool:
    """Whether all its pods run, wherever: before, it has nothing to save."""
    status = gang.get("status", {})
    jobs = status.get("replicatedJobsStatus", [status])  # of a JobSet, of a Job
    return all(job.get("ready") or job.get("succeeded") for job in jobs)


def refuse_what_stays(gang: Object, others: list[Object]) -> None:
    """`others`: what a stage has besides its gang. Raises SubmitError (input) if there is any."""
    if others:
        kinds, own = ", ".join(sorted({body["kind"] for body in others})), gang["metadata"]["labels"]
        raise SubmitError(
            f"the queue {own.get(names.QUEUE)} is MultiKueue's, which sends a {gang['kind']} to another "
            f"cluster, and not the stage's {kinds}",
            where=own.get(names.STAGE),
            hint="what can be sent: docs/how-to/kubernetes.md; or take a queue of that cluster itself",
            kind="input",
        )


def clusters_of(api: ClusterApi, queue: str) -> list[str]:
    """That a LocalQueue's gangs may be sent to, by their manager's names; none where it is an ordinary one.
    Raises ApiError, also where who asks may not look."""
    kueue, what = f"/apis/kueue.x-k8s.io/{api.kueue_version()}", f"read the queue {queue}"
    local = api.request("GET", f"{kueue}/namespaces/{api.namespace}/localqueues/{queue}", what=what)
    spec = api.request("GET", f"{kueue}/clusterqueues/{local['spec']['clusterQueue']}", what=what)["spec"]
    told = spec.get("admissionChecksStrategy", {}).get("admissionChecks", [])
    for check in [*spec.get("admissionChecks", []), *(one["name"] for one in told)]:
        about = api.request("GET", f"{kueue}/admissionchecks/{check}", what=what)["spec"]
        if about.get("controllerName") == CONTROLLER:
            name = about["parameters"]["name"]
            config = api.request("GET", f"{kueue}/multikueueconfigs/{name}", what=what)
            return list(config["spec"]["clusters"])
    return []


def known_workers(api: ClusterApi, queue: str) -> dict[str, ClusterApi]:
    """Those that the kubeconfig has a context of the same name for; none where who asks may not look."""
    found = {}
    with contextlib.suppress(ApiError):
        for name in clusters_of(api, queue):
            with contextlib.suppress(SubmitError):  # no such context
                found[name] = connect(name, api.namespace)
                found[name].deadline_seconds = _WORKER_SECONDS
    return {name: one for name, one in found.items() if one.host != api.host}


def lacking(api: ClusterApi, pods: Iterable[Object], queue: str) -> list[str]:
    """What these pods (specs) name and a cluster has not, as far as who asks may look: "Secret a", say; or
    its LocalQueue of that name."""
    wanted: set[tuple[str, str]] = set()
    for spec in pods:
        wanted |= {("Secret", one["name"]) for one in spec.get("imagePullSecrets", [])}
        for volume in spec.get("volumes", []):
            wanted |= _named(volume, _OF_VOLUMES)
        for container in spec["containers"]:
            for one in container.get("envFrom", []):
                wanted |= _named(one, _OF_ENV, "Ref")
            for one in container.get("env", []):
                wanted |= _named(one.get("valueFrom", {}), _OF_ENV, "KeyRef")
    core = f"/api/v1/namespaces/{api.namespace}"
    paths = {f"{kind} {name}": f"{core}/{kind.lower()}s/{name}" for kind, name in sorted(wanted)}
    kueue = f"/apis/kueue.x-k8s.io/{api.kueue_version()}"
    paths[f"LocalQueue {queue}"] = f"{kueue}/namespaces/{api.namespace}/localqueues/{queue}"
    absent = []
    for what, path in paths.items():
        try:
            api.request("GET", path, what=f"read {what}")
        except ApiError as error:
            absent += [what] if error.status == 404 else []
    return absent


def _named(source: Object, kinds: Mapping[str, tuple[str, str]], suffix: str = "") -> set[tuple[str, str]]:
    """Kind and name of what `source` refers to, and needs. `suffix`: of the keys by which it does."""
    return {
        (kind, one[name])
        for of, (kind, name) in kinds.items()
        if (one := source.get(of + suffix)) is not None and not one.get("optional")
    }


class Sent:
    """What is known of a gang that may have been sent elsewhere. `ran`: it was, once. `worker`: where to, by
    the manager's name for that cluster."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.ran = False
        self.worker: str | None = None
        self._store = store
        self._unheard = outcome_keys(plan)
        self._grace_seconds = plan.launch.shutdown_seconds + GRACE_SECONDS
        self._was_ready = False
        self._gone: float | None = None
        self._asked = -math.inf

    def look(self, api: ClusterApi, gang: Object) -> bool:
        """Whether it was taken back: by a queue that needs its quota, by the worker's Kueue, or since the
        manager lost that worker. Its pods may still run there, and another worker is about to get it."""
        if not is_sent(gang):
            return False
        if gang["spec"].get("suspend"):
            return self.ran
        self.ran, self._was_ready = True, self._was_ready or is_ready(gang)
        if self.worker is None and time.monotonic() - self._asked > _ASK_SECONDS:
            self._asked = time.monotonic()
            self.worker = _worker_of(api, gang)
        return False

    def has_ended(self) -> bool:
        """Of a gang that is not there any more: all its launchers have said so, or have had their time."""
        if not self._was_ready:
            return True
        self._gone = self._gone or time.monotonic()
        while self._unheard and self._store.exists(self._unheard[-1]):
            self._unheard.pop()
        return not self._unheard or time.monotonic() - self._gone > self._grace_seconds

    @property
    def where(self) -> str:
        """ "" where it never was anywhere."""
        return (f"cluster {self.worker}" if self.worker else "another cluster") if self.ran else ""

    def note(self, gang: Object | None) -> str:
        """Of one that runs elsewhere, "" of others."""
        if not self.ran or gang is None:
            return ""
        return f"MultiKueue sent it to {self.where}" + (
            "" if is_ready(gang) else ", where not all its pods are ready"
        )


def _worker_of(api: ClusterApi, gang: Object) -> str | None:
    try:
        found = api.list("Workload", {"kueue.x-k8s.io/job-uid": gang["metadata"]["uid"]})
    except ApiError:
        return None  # no right to look
    return next(filter(None, (one.get("status", {}).get("clusterName") for one in found)), None)
