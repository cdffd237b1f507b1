"""A queue of MultiKueue's: the Kueue of a manager cluster sends each gang to one of its worker clusters, and
copies the gang's status back, and nothing else. Pods, their events and their nodes are the worker's, where a
driver does not look: what became of a stage it reads in the store, as ever.

What is said here was seen with Kueue 0.17 (pkg/controller/admissionchecks/multikueue of
github.com/kubernetes-sigs/kueue).
"""

from __future__ import annotations

import time

from mlpipe._core.errors import SubmitError
from mlpipe.plan.plan import Plan
from mlpipe.render import names
from mlpipe.render.pod import GRACE_SECONDS
from mlpipe.store.base import Store
from mlpipe.submit.handle import outcome_keys
from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, Object

CONTROLLER = "kueue.x-k8s.io/multikueue"


def is_sent(gang: Object) -> bool:
    """Whether MultiKueue has it run in another cluster: Kueue's webhook marks it when it is made."""
    return bool(gang.get("spec", {}).get("managedBy") == CONTROLLER)


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


class Sent:
    """What is known of a gang that may have been sent elsewhere. `ran`: it was, once. `worker`: where to, by
    the manager's name for that cluster."""

    def __init__(self, store: Store, plan: Plan) -> None:
        self.ran = False
        self.worker: str | None = None
        self._store = store
        self._unheard = outcome_keys(plan)
        self._grace_seconds = plan.launch.shutdown_seconds + GRACE_SECONDS
        self._gone: float | None = None

    def look(self, api: ClusterApi, gang: Object) -> bool:
        """Whether it was taken back: by a queue that needs its quota, by the worker's Kueue, or since the
        manager lost that worker. Its pods may still run there, and another worker is about to get it."""
        if not is_sent(gang):
            return False
        if gang["spec"].get("suspend"):
            return self.ran
        self.ran = True
        if self.worker is None:
            self.worker = _worker_of(api, gang)
        return False

    def has_ended(self) -> bool:
        """Of a gang that is not there any more: all its launchers have said so, or have had their time."""
        if not self.ran:
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
        status = gang.get("status", {})
        jobs = status.get("replicatedJobsStatus", [status])  # of a JobSet, of a Job
        is_ready = all(job.get("ready") or job.get("succeeded") for job in jobs)
        return f"MultiKueue sent it to {self.where}" + (
            "" if is_ready else ", where not all its pods are ready"
        )


def _worker_of(api: ClusterApi, gang: Object) -> str | None:
    try:
        found = api.list("Workload", {"kueue.x-k8s.io/job-uid": gang["metadata"]["uid"]})
    except ApiError:
        return None  # no right to look
    return next(filter(None, (one.get("status", {}).get("clusterName") for one in found)), None)
