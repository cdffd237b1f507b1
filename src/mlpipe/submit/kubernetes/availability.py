"""Whether a cluster has room for a run now: by Kueue's quota where a queue is named, else by what its nodes
have free. How long something else still runs nobody there knows, so a run that has to wait has no time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlpipe.render.names import QUEUE
from mlpipe.render.trainjob import pod_of
from mlpipe.submit.kubernetes.api import ApiError, ClusterApi, Object
from mlpipe.submit.kubernetes.multikueue import clusters_of
from mlpipe.submit.submission import Availability

_SUFFIXES = {"m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_SUFFIXES |= {f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTP", start=1)}
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][+-]?[0-9]+)?)([mkMGTP]?|[KMGTP]i)")
_ROUNDING = 1e-9  # tenths of cores are no binary fractions
_OVER = "status.phase!=Succeeded,status.phase!=Failed"


@dataclass(frozen=True)
class Pods:
    """So many pods of one kind, at the same time."""

    number: int
    spec: Object
    queue: str | None

    @property
    def requests(self) -> dict[str, float]:
        """Of each."""
        return requests_of(self.spec)


def availability(api: ClusterApi, bodies: Sequence[Object]) -> Availability:
    """`bodies`: the objects of its stages. Raises ApiError where the cluster is away."""
    stages = list(_pods(bodies))
    found = [_quota(api, pods.queue, pods) for pods in stages if pods.queue is not None]
    if any(pods.queue is None for pods in stages):
        found.append(_nodes(api, [pods for pods in stages if pods.queue is None]))
    worst = [one for one in found if one.wait_seconds is None]
    return (worst or found or [Availability(0.0, "nothing of it needs a pod of its own")])[0]


def _pods(bodies: Sequence[Object]) -> Iterator[Pods]:
    for body in bodies:
        queue = body["metadata"].get("labels", {}).get(QUEUE)
        if body["kind"] == "Job":
            yield _of_job(body["spec"], queue)
        elif body["kind"] == "JobSet":
            for job in body["spec"]["replicatedJobs"]:
                pods = _of_job(job["template"]["spec"], queue)
                yield Pods(pods.number * job.get("replicas", 1), pods.spec, queue)
        elif body["kind"] == "TrainJob":
            yield Pods(body["spec"]["trainer"]["numNodes"], pod_of(body["spec"]), queue)


def _of_job(job: Object, queue: str | None) -> Pods:
    return Pods(job.get("parallelism", 1), job["template"]["spec"], queue)


def amount(text: Any) -> float:
    """Of Kubernetes' quantities, like 100m or 4Gi. Raises ValueError."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        raise ValueError(f"{text!r} is no quantity")
    return float(found[1]) * _SUFFIXES[found[2]]


def requests_of(spec: Object) -> dict[str, float]:
    """Of a pod: what its containers ask for together. Its limits count where it says no request."""
    total: Counter[str] = Counter()
    for container in spec.get("containers", []):
        resources = container.get("resources", {})
        for name, text in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[name] += amount(text)  # type: ignore[assignment]
    return dict(total)


def _quota(api: ClusterApi, name: str, pods: Pods) -> Availability:
    """As Kueue has it in this moment."""
    version = api.kueue_version()
    if version is None:
        return Availability(None, f"it waits in the queue {name}, and this cluster has no Kueue")
    kueue = f"/apis/kueue.x-k8s.io/{version}"
    what = f"read the queue {name}"
    try:
        local = api.request("GET", f"{kueue}/namespaces/{api.namespace}/localqueues/{name}", what=what)
        queue = api.request("GET", f"{kueue}/clusterqueues/{local['spec']['clusterQueue']}", what=what)
        if clusters := clusters_of(api, name):
            return Availability(
                None, f"queue {name}: MultiKueue chooses among {', '.join(clusters)}, and when"
            )
    except ApiError as error:
        if error.status not in (403, 404):
            raise
        return Availability(None, f"queue {name}: {error.message}")
    if waiting := queue.get("status", {}).get("pendingWorkloads", 0):
        return Availability(None, f"queue {name}: {waiting} before it")
    lacking = _lacking(queue, {key: pods.number * each for key, each in pods.requests.items()})
    if lacking:
        return Availability(None, f"queue {name} has too little quota free: {', '.join(lacking)}")
    return Availability(0.0, f"queue {name} has the quota free")


def _lacking(queue: Object, wanted: Mapping[str, float]) -> list[str]:
    """Of resources under quota, which no flavor has enough of."""
    used: Counter[tuple[str, str]] = Counter()
    for flavor in queue.get("status", {}).get("flavorsReservation", []):
        for resource in flavor["resources"]:
            used[flavor["name"], resource["name"]] += amount(resource["total"])  # type: ignore[assignment]
    free: dict[str, float] = {}
    for group in queue["spec"].get("resourceGroups", []):
        for flavor in group["flavors"]:
            for resource in flavor["resources"]:
                left = amount(resource["nominalQuota"]) - used[flavor["name"], resource["name"]]
                free[resource["name"]] = max(left, free.get(resource["name"], 0.0))
    return [
        f"{name} {left:g} of {wanted[name]:g}" for name, left in free.items() if left < wanted.get(name, 0.0)
    ]


def _nodes(api: ClusterApi, stages: Sequence[Pods]) -> Availability:
    """By what pods on them ask for. Quotas of the namespace are the server's dry run's."""
    try:
        nodes = api.request("GET", "/api/v1/nodes", what="list nodes")["items"]
        query = {"fieldSelector": _OVER}
        running = api.request("GET", "/api/v1/pods", what="list all pods", query=query)["items"]
    except ApiError as error:
        if error.status != 403:
            raise
        return Availability(None, "you may not list its nodes and their pods")
    used: dict[str, Counter[str]] = {}
    for pod in running:
        taken = used.setdefault(pod["spec"].get("nodeName", ""), Counter({"pods": 0}))
        taken["pods"] += 1
        for name, each in requests_of(pod["spec"]).items():
            taken[name] += each  # type: ignore[assignment]
    for pods in stages:
        right = [node for node in nodes if takes(node, pods.spec)]
        room = sum(_room(node, pods, used.get(node["metadata"]["name"], Counter())) for node in right)
        if room < pods.number:
            ever = sum(_room(node, pods, Counter()) for node in right)
            words = f"{room} of {pods.number} pods have room on its nodes now"
            return Availability(None, words if ever >= pods.number else f"{words}, {ever} if they were empty")
    return Availability(0.0, "its nodes have room")


def _room(node: Object, pods: Pods, used: Mapping[str, float]) -> int:
    """How many of them it takes."""
    there = {name: amount(text) for name, text in node["status"].get("allocatable", {}).items()}
    wanted = {**pods.requests, "pods": 1.0}
    free = {name: there.get(name, 0.0) - used.get(name, 0.0) for name in wanted}
    fitting = [int(free[name] / each + _ROUNDING) for name, each in wanted.items() if each]
    return max(0, min(fitting))


def takes(node: Object, spec: Object) -> bool:
    """Whether a pod may stand there, were it empty: it is ready, has the labels, and its taints are
    tolerated."""
    ready = any(
        one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions", [])
    )
    labels = node["metadata"].get("labels", {})
    asked = spec.get("nodeSelector", {}).items() <= labels.items()
    terms = (
        spec.get("affinity", {})
        .get("nodeAffinity", {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", {})
        .get("nodeSelectorTerms", [])
    )
    near = not terms or any(
        all(
            labels.get(one["key"]) in one["values"]
            for one in term.get("matchExpressions", [])
            if one["operator"] == "In"
        )
        for term in terms
    )
    taints = [one for one in node["spec"].get("taints", []) if one["effect"] != "PreferNoSchedule"]
    tolerated = all(any(_tolerates(one, taint) for one in spec.get("tolerations", [])) for taint in taints)
    return ready and not node["spec"].get("unschedulable") and asked and near and tolerated


def _tolerates(toleration: Object, taint: Object) -> bool:
    """As Kubernetes' own `ToleratesTaint`."""
    if toleration.get("effect") not in (None, taint["effect"]):
        return False
    if toleration.get("key") not in (None, taint["key"]):
        return False
    exists = toleration.get("operator") == "Exists"
    return exists or toleration.get("value", "") == taint.get("value", "")
