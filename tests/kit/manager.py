"""A manager of MultiKueue beside a test cluster, in its network: an API server, the collector of what nobody
owns, and a Kueue that sends what it admits to that cluster. It has no nodes, no scheduler, no JobSet
controller: nothing runs here, as a manager should have it."""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from kit.cluster import Cluster
from kit.cluster_addons import Addons
from kit.cluster_control import ControlPlane
from kit.cluster_objects import named
from kit.cluster_process import Namespaces, Process, wait_until
from kit.place import Place

WORKER = "worker-a"  # the cluster, as the manager calls it
_PORT, _SHIFT = 6443, 100
_SECONDS = 60
_VERSION = "kueue.x-k8s.io/v1beta2"


class Manager:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._namespaces: Namespaces = cluster.nodes[0].namespaces
        self.control = ControlPlane(folder, self._namespaces, 10, _PORT)
        self.kubectl, self.apply = self.control.kubectl, self.control.apply
        self._addons = Addons(folder, self.control, self._namespaces, _SHIFT)
        self._cluster = cluster
        self.kueue: Process | None = None

    def start(self) -> None:
        self.control.start_api()
        self.control.start_collector()
        self._addons.jobset_kinds()
        self.kueue = self._addons.kueue(is_manager=True)
        self._connect()
        location = {"kubeConfig": {"locationType": "Secret", "location": WORKER}}
        parameters = {"apiGroup": "kueue.x-k8s.io", "kind": "MultiKueueConfig", "name": "workers"}
        check = {"controllerName": "kueue.x-k8s.io/multikueue", "parameters": parameters}
        self.apply(
            named(_VERSION, "MultiKueueCluster", WORKER, spec={"clusterSource": location}),
            named(_VERSION, "MultiKueueConfig", "workers", spec={"clusters": [WORKER]}),
            named(_VERSION, "AdmissionCheck", "workers", spec=check),
        )

        def active() -> bool:
            found = self.control.get("/apis/kueue.x-k8s.io/v1beta2/admissionchecks/workers")
            return any(
                one["type"] == "Active" and one["status"] == "True"
                for one in found.get("status", {}).get("conditions", [])
            )

        wait_until("an active MultiKueue", active, _SECONDS, [self.kueue])

    def place(self, place: Place, queue: str, quota: Mapping[str, str]) -> Place:
        """The same namespace, store and person here, with a queue of MultiKueue's of that name, which the
        person may read, and a context for the worker. What is asked of objects and pods is the worker's."""
        self.kubectl("apply", "--server-side", "-k", place.folder / "overlay")
        self.kubectl("-n", place.namespace, "create", "serviceaccount", "person")
        person = f"--serviceaccount={place.namespace}:person"
        self.kubectl(
            "-n", place.namespace, "create", "rolebinding", "person", "--role=mlpipe-submitter", person
        )
        resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
        flavor = {"name": queue, "resources": resources}
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": list(quota), "flavors": [flavor]}],
            "admissionChecksStrategy": {"admissionChecks": [{"name": "workers"}]},
        }
        self.apply(
            named(_VERSION, "ResourceFlavor", queue),
            named(_VERSION, "ClusterQueue", queue, spec=spec),
            named(_VERSION, "LocalQueue", queue, place.namespace, spec={"clusterQueue": queue}),
        )
        reads = "--resource=localqueues,clusterqueues,admissionchecks,multikueueconfigs.kueue.x-k8s.io"
        self.kubectl("create", "clusterrole", "reads", "--verb=get", reads)
        self.kubectl("create", "clusterrolebinding", "reads", "--clusterrole=reads", person)
        path = self.control.kubeconfig_for("person", place.namespace)
        document = json.loads(path.read_text())
        theirs = json.loads(Path(place.environment["KUBECONFIG"]).read_text())
        for kind in ("clusters", "users"):
            document[kind] += [{**one, "name": WORKER} for one in theirs[kind]]
        document["contexts"] += [{"name": WORKER, "context": {"cluster": WORKER, "user": WORKER}}]
        path.write_text(json.dumps(document))
        here = copy.copy(place)
        here.environment = {**place.environment, "KUBECONFIG": str(path)}
        return here

    def _connect(self) -> None:
        """Hands it the worker's kubeconfig, all in one, as Kueue wants it."""
        document = json.loads(self._cluster.kubeconfig.read_text())
        cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
        for one, key in (
            (cluster, "certificate-authority"),
            (user, "client-certificate"),
            (user, "client-key"),
        ):
            one[f"{key}-data"] = base64.b64encode(Path(one.pop(key)).read_bytes()).decode()
        data = {"stringData": {"kubeconfig": json.dumps(document)}}
        self.apply(named("v1", "Secret", WORKER, "kueue-system", **data))


@contextlib.contextmanager
def manager(cluster: Cluster, folder: Path) -> Iterator[Manager]:
    one = Manager(cluster, folder)
    try:
        one.start()
        yield one
    finally:
        if one.kueue is not None:
            one.kueue.stop(signal.SIGKILL)
        one.control.stop()
