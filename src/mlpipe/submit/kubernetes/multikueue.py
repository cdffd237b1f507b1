"""A queue of MultiKueue's: the Kueue of a manager cluster sends each gang to one of its worker clusters, and
copies the gang's status back, and nothing else. Pods, their events and their nodes are the worker's, where a
driver does not look: what became of a stage it reads in the store, as ever.

What is said here was seen with Kueue 0.17 (pkg/controller/admissionchecks/multikueue of
github.com/kubernetes-sigs/kueue).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

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
_OF_ENV = {"configMap": "ConfigMap", "secret": "Secret"}


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
    return found


def lacking(api: ClusterApi, pods: Iterable[Object]) -> list[str]:
    """What these pods (specs) name and a cluster has not, as far as who asks may look: "Secret a", say."""
    wanted: set[tuple[str, str]] = set()
    for spec in pods:
        wanted |= {("Secret", one["name"]) for one in spec.get("imagePullSecrets", [])}
        for volume in spec.get("volumes", []):
            wanted |= {(kind, volume[of][key]) for of, (kind, key) in _OF_VOLUMES.items() if of in volume}
        for one in (one for container in spec["containers"] for one in container.get("envFrom", [])):
            wanted |= {(kind, one[f"{of}Ref"]["name"]) for of, kind in _OF_ENV.items() if f"{of}Ref" in one}
        for one in (one.get("valueFrom", {}) for container in spec["containers"] for one in container["env"]):
            wanted |= {
                (kind, one[f"{of}KeyRef"]["name"]) for of, kind in _OF_ENV.items() if f"{of}KeyRef" in one
            }
    absent = []
    for kind, name in sorted(wanted):
        path = f"/api/v1/namespaces/{api.namespace}/{kind.lower()}s/{name}"
        try:
            api.request("GET", path, what=f"read {kind} {name}")
        except ApiError as error:
            absent += [f"{kind} {name}"] if error.status == 404 else []
    return absent


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

    def look(self, api: ClusterApi, gang: Object) -> bool:
        """Whether it was taken back: by a queue that needs its quota, by the worker's Kueue, or since the
        manager lost that worker. Its pods may still run there, and another worker is about to get it."""
        if not is_sent(gang):
            return False
        if gang["spec"].get("suspend"):
            return self.ran
        self.ran, self._was_ready = True, self._was_ready or is_ready(gang)
        if self.worker is None:
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
