"""Why pods do not run yet, in one sentence with the remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mlpipe.submit.cluster_api import ApiError, ClusterApi, Object

_IMAGE = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable")
# what the scheduler or an admission says, and what to do about it; the first that fits
_REMEDIES = {
    r"Insufficient [a-z0-9.-]+/": "wait for free ones, or ask for fewer with resources.gpus_per_node",
    r"Insufficient cpu": "no node has that many free cores: lower resources.cpus",
    r"Insufficient memory": "no node has that much free memory: lower resources.memory",
    r"node affinity/selector": "no such node: look at resources.gpu and kubernetes.node_selector",
    r"untolerated taint": "add the taint to kubernetes.tolerations",
    r"persistentvolumeclaim .* not found": "make the claim, or correct kubernetes.volumes",
    r"(?i)persistentvolumeclaim": "the claim has no volume: see kubectl describe pvc",
    r"exceeded quota": "wait for other runs, or have the namespace's quota raised",
    r"violates PodSecurity": "look at kubernetes.patches and kubernetes.rdma",
    r"secret .* not found|couldn't find key": "make it, or correct kubernetes.store.secret",
    r"configmap .* not found": "make it, or correct the spec",
    r"serviceaccount .* not found": "apply k8s/base (docs/how-to/cluster-setup.md)",
}


def why_pending(api: ClusterApi, selector: Mapping[str, str]) -> str:
    """Of the pods that `selector` names; "" when they run, or are just about to."""
    pods = api.list("Pod", selector)
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase") == "Pending"]
    for pod in waiting:
        if (reason := _of_pod(api, pod)) is not None:
            return f"pod {pod['metadata']['name']} waits: {reason}"
    if pods:
        return ""
    return _without_pods(api, selector)


def _of_pod(api: ClusterApi, pod: Object) -> str | None:
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return _told(condition.get("message") or condition.get("reason", "not scheduled"))
    for container in status.get("containerStatuses", []) + status.get("initContainerStatuses", []):
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE:
            remedy = "correct `image`, push it, or add kubernetes.image_pull_secrets"
            return f"image {container.get('image')!r} cannot be pulled ({reason}); {remedy}"
        if reason not in ("", "ContainerCreating", "PodInitializing"):
            return _told(f"{reason}: {message}")
    return _of_events(api, pod["metadata"]["name"], "Pod", ("FailedMount", "FailedCreatePodSandBox"))


def _without_pods(api: ClusterApi, selector: Mapping[str, str]) -> str:
    """Admission or quota keeps the controllers from making any."""
    for kind in ("JobSet", "Job"):
        try:
            gangs = api.list(kind, selector)
        except ApiError:
            continue  # a cluster without JobSet
        for gang in gangs:
            name = gang["metadata"]["name"]
            if gang.get("spec", {}).get("suspend"):
                return f"{kind} {name} is suspended: {_of_workload(api, gang)}"
            reason = _of_events(api, name, kind, ("FailedCreate", "JobCreationFailed"))
            if reason is not None:
                return f"{kind} {name} has no pods: {reason}"
    return ""


def _of_workload(api: ClusterApi, gang: Object) -> str:
    """Kueue's own words."""
    try:
        workloads = api.list("Workload")
    except ApiError:
        return "its queue has not admitted it"
    for workload in workloads:
        owners = workload["metadata"].get("ownerReferences", [])
        if any(owner["uid"] == gang["metadata"]["uid"] for owner in owners):
            for condition in workload.get("status", {}).get("conditions", []):
                if condition["type"] in ("QuotaReserved", "Admitted") and condition["status"] == "False":
                    return f"Kueue: {condition.get('message', 'waits for quota')}"
    return "its queue has not admitted it"


def _of_events(api: ClusterApi, name: str, kind: str, reasons: tuple[str, ...]) -> str | None:
    fields = f"involvedObject.name={name},involvedObject.kind={kind},type=Warning"
    events = [event for event in api.list("Event", fields=fields) if event.get("reason") in reasons]
    return _told(events[-1].get("message", "")) if events else None


def _told(message: str) -> str:
    """The first line of the cluster's words, and the remedy if we know one."""
    text = message.strip().splitlines()[0].rstrip(". ") if message.strip() else "no reason given"
    for pattern, remedy in _REMEDIES.items():
        if re.search(pattern, message):
            return f"{text}; {remedy}"
    return text
