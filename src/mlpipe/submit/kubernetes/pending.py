"""Why pods do not run yet, in one sentence with the remedy.

The words are those of Kubernetes 1.36 (scheduler, kubelet, admission, controllers) and Kueue 0.17; older ones
that say the same are known as well. What nobody foresaw is told as the cluster says it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime

from mlpipe.render.names import QUEUE
from mlpipe.submit.kubernetes.api import NO_KUEUE, ApiError, ClusterApi, Object
from mlpipe.submit.kubernetes.postmortem import last_line

_LOST_SECONDS = 30.0  # a pod that outlives its grace period by this much has lost its node
_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
_STARTING = ("", "ContainerCreating", "PodInitializing")
_CRASHED = "CrashLoopBackOff"
_MOUNTS = ("FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox")
# why there are no pods, of a Job, a JobSet, a TrainJob
_UNMADE = ("FailedCreate", "JobCreationFailed", "TrainJobResourcesCreationFailed")
_LOST_TAINTS = r"node\.kubernetes\.io/(not-ready|unreachable|[a-z]+-pressure|network-unavailable)"
# what the cluster says, and what to do about it; the first that fits
_REMEDIES = {
    # scheduler
    r"no nodes available|0/0 nodes": "the cluster has no nodes (yet): see kubectl get nodes",
    r"Insufficient [a-z0-9.-]+/": "wait for free ones, or ask for fewer with resources.gpus_per_node",
    r"Insufficient cpu": "no node has that many free cores: wait, or lower resources.cpus",
    r"Insufficient memory": "no node has that much free memory: wait, or lower resources.memory",
    r"Insufficient ephemeral-storage": "no node has that much free disk: wait, or lower resources.disk",
    r"Too many pods": "the nodes hold as many pods as they may: wait, or add nodes",
    r"node affinity/selector|match node affinity|^(nodeSelector|affinity)": "no such node: look at "
    "resources.gpu and kubernetes.node_selector",
    _LOST_TAINTS: "the node is not ready: see kubectl get nodes",
    r"untolerated taint|had taints? |^taint ": "add the nodes' taint to kubernetes.tolerations, if the run "
    "belongs there: kubectl get nodes -o custom-columns=NODE:.metadata.name,TAINTS:.spec.taints",
    r"were unschedulable": "the nodes are cordoned: wait, or kubectl uncordon them",
    r"volume node affinity|PersistentVolume's node affinity|available volume zone": "the volume lies where "
    "the pod may not run: look at kubernetes.volumes and kubernetes.node_selector",
    r"persistentvolumeclaim .* not found": "make the claim, or correct kubernetes.volumes",
    r"(?i)persistentvolumeclaim|persistent volumes to bind": "the claim has no volume: see kubectl describe "
    "pvc",
    r"scheduling gates?": "whoever set the gate must lift it",
    # admission
    r"exceeded quota": "wait for other runs, or have the namespace's quota raised",
    r"must specify (limits|requests)|failed quota": "the quota wants what the pods do not state: add it with "
    "kubernetes.patches, or have the quota changed",
    r"(maximum|minimum) .* usage per (Container|Pod)": "the namespace's LimitRange forbids that: change "
    "resources of the stage, or have it changed",
    r"ValidatingAdmissionPolicy": "a rule of this cluster: keep to it, or ask who set it",
    r"violates PodSecurity": "look at kubernetes.patches and kubernetes.rdma",
    r"serviceaccount .* not found": "apply k8s/base (docs/how-to/cluster-setup.md)",
    r"no PriorityClass": "make it, or correct kubernetes.priority_class",
    r"(?i)runtimeclass.* not found|runtime handler|no runtime for": "correct kubernetes.runtime_class",
    # kubelet
    r"Multi-Attach|already in-use|already used by": "another node holds the volume: use one that is "
    "ReadWriteMany, or wait",
    r"secret .* not found|couldn't find key .* in Secret|non-existent secret": "make it, or correct "
    "kubernetes.store.secret, driver_secret beside it and kubernetes.env_from",
    r"configmap .* not found|couldn't find key .* in ConfigMap|non-existent config": "make it, or correct "
    "kubernetes.env_from",
    r"runAsNonRoot": "build the image to run as a user with a number above 0 (USER 10001)",
    r"executable file not found|no such file or directory|No module named '?mlpipe": "the image lacks it: is "
    "it built from mlpipe's Containerfile?",
    # Kueue
    r"> maximum capacity": "it can never fit: ask for less, or have the queue's quota raised",
    r"insufficient (unused )?quota": "wait for other runs, or have the queue's quota raised",
    r"LocalQueue .* doesn't exist": "make the LocalQueue, or correct kubernetes.queue",
    r"(Local|Cluster)Queue .* (is (inactive|stopped|terminating)|doesn't exist)": "have the queue repaired: "
    "kubectl describe localqueue, clusterqueue",
    r"namespace doesn't match ClusterQueue": "the ClusterQueue is not for this namespace: correct "
    "kubernetes.queue, or have its namespaceSelector changed",
    r"resource .* unavailable in ClusterQueue": "a flavor of the queue must list every resource that the "
    "pods ask for",
    r"topology .* allows? to fit": "wait for free nodes as near each other as kubernetes.topology wants them",
    r"not (support TopologyAwareScheduling|contain the requested level)": "correct kubernetes.topology, or "
    "have the flavor's topologyName set to a Topology with that label",
}
_PULLS = {
    r"not present with pull policy": "load it onto the nodes, or correct kubernetes.image_pull_policy",
    r"(?i)unauthorized|denied|forbidden|authentication required|no basic auth": "the registry wants a login: "
    "add kubernetes.image_pull_secrets",
    r"(?i)no such host|i/o timeout|connection refused|server misbehaving|dial tcp": "the node does not reach "
    "the registry",
    r"(?i)no match for platform": "build it for the nodes' processors",
}


def why_pending(
    api: ClusterApi, selector: Mapping[str, str], wanted: int = 1, pods: list[Object] | None = None
) -> str:
    """Of the `wanted` pods that `selector` names (`pods`: where they are known already); "" when they run, or
    are just about to."""
    pods = api.list("Pod", selector) if pods is None else pods
    for pod in pods:
        if (reason := _lost(pod)) is not None:
            return reason
    for pod in pods:
        waits = pod.get("status", {}).get("phase") == "Pending" or _crash(pod) is not None
        if waits and (reason := _of_pod(api, pod)) is not None:
            return f"pod {pod['metadata']['name']} waits: {reason}"
    return "" if len(pods) >= wanted else _without_pods(api, selector)


def _lost(pod: Object) -> str | None:
    """It stays for ever while its node is away, and keeps its Job and JobSet from making another."""
    deleted, name = pod["metadata"].get("deletionTimestamp"), pod["metadata"]["name"]
    if deleted is None:
        return None
    late = time.time() - datetime.fromisoformat(deleted).timestamp()  # it counts the grace period already
    if late < _LOST_SECONDS:
        return None
    node = pod.get("spec", {}).get("nodeName", "?")
    return (
        f"pod {name} should have ended {late:.0f} s ago, and node {node} does not say that it has: it may be "
        f"lost; see kubectl get node {node}, and when it is gone for good: kubectl delete node {node}"
    )


def _of_pod(api: ClusterApi, pod: Object) -> str | None:
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _told(condition.get("message") or condition.get("reason", "not scheduled"))
    for container in status.get("initContainerStatuses", []) + status.get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            remedy = (
                _first(_PULLS, message) or "correct `image`, push it, or add kubernetes.image_pull_secrets"
            )
            return f"image {container.get('image')!r} cannot be pulled ({reason}); {remedy}"
        if reason == _CRASHED and (words := _crash(pod)):
            return _told(f"it fails again and again: {words}")
        if reason not in _STARTING:
            return _told(f"{reason}: {message}" if message else reason)
    return _of_events(api, pod["metadata"]["name"], "Pod", _MOUNTS)


def _crash(pod: Object) -> str | None:
    """The last words of a container that Kubernetes waits to start again ("": it had none), as it does with a
    driver's; its pod counts as running."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        if (container.get("state", {}).get("waiting") or {}).get("reason") == _CRASHED:
            ended = container.get("lastState", {}).get("terminated") or {}
            return last_line(ended.get("message", ""))
    return None


def _without_pods(api: ClusterApi, selector: Mapping[str, str]) -> str:
    """Admission, quota or a queue keeps the controllers from making (all of) them."""
    of_jobs = selector
    for kind in ("TrainJob", "JobSet", "Job"):
        try:
            gangs = api.list(kind, of_jobs if kind == "Job" else selector)
        except ApiError as error:
            if error.status != 404:  # a cluster without JobSet
                raise
            continue
        for gang in gangs:
            name = gang["metadata"]["name"]
            if kind == "TrainJob":  # the Job that comes of it has no labels of ours, under Trainer 2.1
                of_jobs = {"jobset.sigs.k8s.io/jobset-name": name}
            if gang.get("spec", {}).get("suspend"):
                return f"{kind} {name} is suspended: {_of_workload(api, gang)}"
            reason = _of_events(api, name, kind, _UNMADE)
            if reason is not None:
                return f"{kind} {name} lacks pods: {reason}"
    return ""


def _of_workload(api: ClusterApi, gang: Object) -> str:
    """Kueue's own words."""
    try:
        if gang["metadata"].get("labels", {}).get(QUEUE) is not None and api.kueue_version() is None:
            return (
                f"it waits in the queue {gang['metadata']['labels'][QUEUE]}, and {NO_KUEUE[0]}; {NO_KUEUE[1]}"
            )
        workloads = api.list("Workload", {"kueue.x-k8s.io/job-uid": gang["metadata"]["uid"]})
    except ApiError:
        workloads = []  # no Kueue, or no right to look
    for workload in workloads:
        for condition in workload.get("status", {}).get("conditions", []):
            if condition["type"] in ("QuotaReserved", "Admitted") and condition["status"] == "False":
                return f"Kueue: {_told(condition.get('message', 'waits for quota'))}"
        for check in workload.get("status", {}).get("admissionChecks", []):
            if check["state"] != "Ready":
                clusters = ", ".join(workload["status"].get("nominatedClusterNames", []))
                words = check.get("message") or (f"not yet admitted by {clusters}" if clusters else "")
                return f"Kueue: its admission check {check['name']} is {check['state']}: {words}".rstrip(": ")
    return "its queue has not admitted it"


def _of_events(api: ClusterApi, name: str, kind: str, reasons: tuple[str, ...]) -> str | None:
    """The latest of them."""
    fields = f"involvedObject.name={name},involvedObject.kind={kind},type=Warning"
    events = [event for event in api.list("Event", fields=fields) if event.get("reason") in reasons]
    events.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return _told(events[-1].get("message", "")) if events else None


def _told(message: str) -> str:
    """The first line of the cluster's words, without what preemption could not do either, and the remedy."""
    text = message.strip().partition("\n")[0]
    text = re.split(r"\.? (?:no new claims to deallocate|preemption: )", text)[0].rstrip(". ")
    return "; ".join(part for part in (text or "no reason given", remedy(message)) if part)


def remedy(message: str) -> str | None:
    """What to do about what the cluster says; None where nobody foresaw it."""
    return _first(_REMEDIES, _what_counts(message))


def _what_counts(message: str) -> str:
    """Of a topology of Kueue that a gang does not fit into: what keeps it from more of the nodes than are
    left, in Kueue's words, like `taint "a=b:NoSchedule"`; else that it does not fit."""
    told = re.search(r"(.*?)\. Total nodes: (\d+); excluded: (.*)", message)
    if told is None:
        return message
    found = re.findall(
        r'(nodeSelector|affinity|taint "[^"]*"): (\d+)', told[3]
    )  # the rest is of these nodes' room
    counts = {why: int(number) for why, number in found}
    why = max(counts, key=counts.__getitem__, default="")
    return why if counts and counts[why] > int(told[2]) - sum(counts.values()) else told[1]


def _first(remedies: Mapping[str, str], message: str) -> str | None:
    return next((remedy for pattern, remedy in remedies.items() if re.search(pattern, message)), None)
