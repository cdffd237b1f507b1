"""Every reason why pods wait, in the cluster's own words (Kubernetes 1.36.3, Kueue 0.10.2 and 0.17.0), and its remedy."""
# ruff: noqa: E501

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import pytest
from kit.apiserver import ApiServer

from mlpipe.submit.kubernetes import pending
from mlpipe.submit.kubernetes.api import ApiError
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = pytest.mark.unit
LABELS = {"mlpipe.dev/run": "r"}
PREEMPTION = " no new claims to deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for scheduling."


def pod(server: ApiServer, name: str = "p", phase: str = "Pending", **status: object) -> dict:
    body = {"metadata": {"name": name, "labels": LABELS}, "spec": {"nodeName": "n1"}}
    return server.put("pods", {**body, "status": {"phase": phase, **status}})


def unscheduled(message: str) -> list[dict]:
    return [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}]


def waiting(reason: str, message: str = "") -> list[dict]:
    state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
    return [{"name": "worker", "image": "registry.example.com/team/mlpipe:1", "state": state}]


def event(server: ApiServer, reason: str, message: str, kind: str, name: str, at: str = "01") -> None:
    body = {
        "metadata": {"name": f"{name}.{kind}.{reason}.{at}"},
        "involvedObject": {"kind": kind, "name": name},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-01-01T00:00:{at}Z",
    }
    server.put("events", body)


def job(server: ApiServer, plural: str = "jobs", **spec: object) -> dict:
    return server.put(plural, {"metadata": {"name": "g", "labels": LABELS}, "spec": spec})


SCHEDULER = {
    "0/3 nodes are available: 3 Insufficient cpu.": "lower resources.cpus",
    "0/3 nodes are available: 3 Insufficient memory.": "lower resources.memory",
    "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient nvidia.com/gpu.": "fewer with "
    "resources.gpus_per_node",
    "0/3 nodes are available: 3 Insufficient ephemeral-storage.": "lower resources.disk",
    "0/3 nodes are available: 3 Too many pods.": "add nodes",
    "0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.": "resources.gpu",
    "0/3 nodes are available: 3 node(s) had untolerated taint(s).": "kubernetes.tolerations",
    "0/3 nodes are available: 3 node(s) had untolerated taint {dedicated: gpu}.": "kubernetes.tolerations",
    "0/1 nodes are available: 1 node(s) had taint {a: b}, that the pod didn't tolerate.": "kubernetes.tolerations",
    "0/3 nodes are available: 3 node(s) had untolerated taint {node.kubernetes.io/unreachable: }.": "kubectl get "
    "nodes",
    "0/3 nodes are available: 3 node(s) were unschedulable.": "cordoned",
    '0/3 nodes are available: persistentvolumeclaim "data" not found.': "make the claim",
    "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.": "kubectl describe pvc",
    '0/3 nodes are available: persistentvolumeclaim "data" is being deleted.': "kubectl describe pvc",
    "0/3 nodes are available: 3 node(s) didn't find available persistent volumes to bind.": "kubectl describe pvc",
    "0/3 nodes are available: 3 node(s) didn't match PersistentVolume's node affinity.": "kubernetes.volumes",
    "no nodes available to schedule pods": "no nodes",
    "Scheduling is blocked due to non-empty scheduling gates": "gate",
}


@pytest.mark.parametrize("message", SCHEDULER)
def test_of_the_scheduler(api, server, message):
    pod(server, conditions=unscheduled(message + PREEMPTION))
    found = why_pending(api, LABELS)
    assert found.startswith(f"pod p waits: {message.rstrip('.')}; ")
    assert SCHEDULER[message] in found
    assert "preemption" not in found
    assert "\n" not in found


IMAGES = [
    (
        "ErrImageNeverPull",
        'Container image "x" is not present with pull policy of Never',
        "load it onto the nodes",
    ),
    (
        "ImagePullBackOff",
        'Back-off pulling image "x": ErrImagePull: rpc error: code = NotFound desc = failed to pull and unpack '
        'image "x": failed to resolve reference "x": x: not found',
        "correct `image`",
    ),
    (
        "ErrImagePull",
        'failed to pull and unpack image "x": failed to resolve reference "x": pull access denied, repository '
        "does not exist or may require authorization: authorization failed: no basic auth credentials",
        "kubernetes.image_pull_secrets",
    ),
    (
        "ErrImagePull",
        'failed to do request: Head "https://x/v2/": dial tcp: lookup x on 10.0.0.10:53: no such host',
        "does not reach the registry",
    ),
    ("ErrImagePull", "no match for platform in manifest: not found", "the nodes' processors"),
    (
        "InvalidImageName",
        'Failed to apply default image tag "X": couldn\'t parse image name',
        "correct `image`",
    ),
]


@pytest.mark.parametrize(("reason", "message", "remedy"), IMAGES)
def test_of_the_image(api, server, reason, message, remedy):
    pod(server, containerStatuses=waiting(reason, message))
    found = why_pending(api, LABELS)
    words = f"pod p waits: image 'registry.example.com/team/mlpipe:1' cannot be pulled ({reason}); "
    assert found.startswith(words)
    assert remedy in found


CONTAINERS = [
    ("CreateContainerConfigError", 'secret "mlpipe-store" not found', "kubernetes.store.secret"),
    (
        "CreateContainerConfigError",
        "couldn't find key AWS_ACCESS_KEY_ID in Secret ml/s",
        "kubernetes.store.secret",
    ),
    ("CreateContainerConfigError", 'configmap "settings" not found', "kubernetes.env_from"),
    ("CreateContainerConfigError", "couldn't find key a in ConfigMap ml/settings", "kubernetes.env_from"),
    (
        "CreateContainerConfigError",
        'container has runAsNonRoot and image will run as root (pod: "p_ml(1)", container: worker)',
        "USER 10001",
    ),
    (
        "RunContainerError",
        "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create "
        'failed: unable to start container process: exec: "python": executable file not found in $PATH',
        "Containerfile",
    ),
    ("CrashLoopBackOff", "", "CrashLoopBackOff"),
]


@pytest.mark.parametrize(("reason", "message", "remedy"), CONTAINERS)
def test_of_the_container(api, server, reason, message, remedy):
    pod(server, containerStatuses=waiting(reason, message))
    found = why_pending(api, LABELS)
    assert found.startswith(f"pod p waits: {reason}")
    assert message in found
    assert remedy in found


MOUNTS = [
    (
        "FailedMount",
        'MountVolume.SetUp failed for volume "k" : secret "mlpipe-store" not found',
        "store.secret",
    ),
    ("FailedMount", 'MountVolume.SetUp failed for volume "c" : configmap "plan" not found', "env_from"),
    ("FailedMount", "references non-existent secret key: ca.crt", "store.secret"),
    (
        "FailedAttachVolume",
        'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) other',
        "ReadWriteMany",
    ),
    (
        "FailedCreatePodSandBox",
        "Failed to create pod sandbox: rpc error: code = Unknown desc = failed to get sandbox runtime: no runtime "
        'for "nvidia" is configured',
        "kubernetes.runtime_class",
    ),
]


@pytest.mark.parametrize(("reason", "message", "remedy"), MOUNTS)
def test_of_events_of_the_pod(api, server, reason, message, remedy):
    pod(server, containerStatuses=waiting("ContainerCreating"))
    assert why_pending(api, LABELS) == ""
    event(server, "Unhealthy", "something else", "Pod", "p", at="09")
    event(server, reason, "an older one", "Pod", "p", at="02")
    event(server, reason, message, "Pod", "p", at="05")
    found = why_pending(api, LABELS)
    assert found.startswith(f"pod p waits: {message}; ")
    assert remedy in found


FORBIDDEN = 'Error creating: pods "g-0-abcde" is forbidden: '
ADMISSION = {
    "exceeded quota: mlpipe, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=16, limited: "
    "requests.nvidia.com/gpu=16": "have the namespace's quota raised",
    "failed quota: mlpipe: must specify limits.cpu for: worker": "kubernetes.patches",
    "maximum memory usage per Container is 1Gi, but limit is 2Gi": "LimitRange",
    'violates PodSecurity "restricted:latest": unrestricted capabilities (container "worker" must not include '
    '"IPC_LOCK" in securityContext.capabilities.add)': "kubernetes.rdma",
    "ValidatingAdmissionPolicy 'mlpipe-guardrails' with binding 'mlpipe-guardrails' denied request: images come "
    "from registry.example.com/team, not docker.io/x:1": "ask who set it",
    'error looking up service account ml/mlpipe-worker: serviceaccount "mlpipe-worker" not found': "k8s/base",
    "no PriorityClass with name high was found": "kubernetes.priority_class",
    'pod rejected: RuntimeClass "nvidia" not found': "kubernetes.runtime_class",
}


@pytest.mark.parametrize("kind", ["JobSet", "Job"])
@pytest.mark.parametrize("message", ADMISSION)
def test_of_admission(api, server, message, kind):
    job(server, f"{kind.lower()}s")
    event(server, "FailedCreate", FORBIDDEN + message, kind, "g")
    found = why_pending(api, LABELS)
    assert found.startswith(f"{kind} g lacks pods: {FORBIDDEN}{message}; ")
    assert ADMISSION[message] in found


def test_a_gang_that_got_only_some_of_its_pods(api, server):
    server.missing.add("jobsets")
    job(server)
    pod(server, phase="Running")
    event(server, "FailedCreate", FORBIDDEN + "exceeded quota: mlpipe", "Job", "g")
    assert why_pending(api, LABELS) == ""
    assert "exceeded quota" in why_pending(api, LABELS, 2)
    pod(server, "q", phase="Running")
    assert why_pending(api, LABELS, 2) == ""


TOPOLOGY = 'couldn\'t assign flavors to pod set worker: topology "racks"'
KUEUE = {
    "couldn't assign flavors to pod set worker: insufficient unused quota for cpu in flavor default, 2 more "
    "needed": "wait for other runs",
    "couldn't assign flavors to pod set worker: insufficient quota for cpu in flavor default, request > maximum "
    "capacity (8 > 4)": "it can never fit",
    "couldn't assign flavors to pod set worker: insufficient quota for cpu in flavor default, previously "
    "considered podsets requests (16) + current podset request (8) > maximum capacity (16)": "it can never fit",
    "couldn't assign flavors to pod set worker: resource rdma/hca unavailable in ClusterQueue": "every resource",
    "LocalQueue team-a doesn't exist": "kubernetes.queue",
    "LocalQueue team-a is inactive": "have the queue repaired",
    "ClusterQueue all is inactive": "have the queue repaired",
    "ClusterQueue all is stopped": "have the queue repaired",
    "LocalQueue team-a is terminating or missing": "have the queue repaired",
    "Workload namespace doesn't match ClusterQueue selector": "namespaceSelector",
    "couldn't assign flavors to pod set worker: flavor h100 doesn't match node affinity": "node_selector",
    'couldn\'t assign flavors to pod set worker: topology "racks" allows to fit only 1 out of 2 pod(s)': "near",
    "couldn't assign flavors to pod set worker: topology \"racks\" doesn't allow to fit any of 2 slice(s). Total "
    'nodes: 4; excluded: resource "cpu": 4': "near",
    f'{TOPOLOGY} doesn\'t allow to fit any of 1 pod(s). Total nodes: 9; excluded: resource "cpu": 2, taint '
    '"nvidia.com/gpu=present:NoSchedule": 6': "kubernetes.tolerations",
    f"{TOPOLOGY} allows to fit only 1 out of 2 pod(s). Total nodes: 4; excluded: taint "
    '"node.kubernetes.io/unreachable:NoSchedule": 3': "not ready",
    f'{TOPOLOGY} doesn\'t allow to fit any of 1 pod(s). Total nodes: 4; excluded: nodeSelector: 2, resource "cpu": '
    '1, taint "key=value:NoSchedule": 1': "kubernetes.node_selector",
    f"{TOPOLOGY} doesn't allow to fit any of 1 pod(s). Total nodes: 1; excluded: affinity: 1": "kubernetes.node_selector",
    f'{TOPOLOGY} doesn\'t allow to fit any of 1 pod(s). Total nodes: 8; excluded: resource "cpu": 5, taint '
    '"key=value:NoSchedule": 3': "near",
    f"{TOPOLOGY} allows to fit only 3 out of 4 pod(s). Total nodes: 9; excluded: taint "
    '"node.kubernetes.io/unreachable:NoSchedule": 2': "near",
    'couldn\'t assign flavors to pod set worker: Flavor "all" does not support TopologyAwareScheduling': "topologyName",
}


def workload(server: ApiServer, message: str, uid: str, name: str = "w") -> None:
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}
    metadata = {"name": name, "labels": {"kueue.x-k8s.io/job-uid": uid}}
    server.put("workloads", {"metadata": metadata, "status": {"conditions": [condition]}})


@pytest.mark.parametrize("message", KUEUE)
def test_of_kueue(api, server, message):
    gang = job(server, "jobsets", suspend=True)
    workload(server, "of another run", "another", "v")
    workload(server, message, gang["metadata"]["uid"])
    found = why_pending(api, LABELS)
    assert found.startswith(f"JobSet g is suspended: Kueue: {message}; ")
    assert KUEUE[message] in found


@pytest.mark.parametrize("served", [["v1beta1"], ["v1beta1", "v1beta2"], ["v1beta2"], ["v1"]], ids=str)
def test_of_every_version_of_kueue(api, server, served):
    server.versions["kueue.x-k8s.io"] = served
    workload(server, "waits", job(server, suspend=True)["metadata"]["uid"])
    assert "Kueue: waits" in why_pending(api, LABELS)
    assert f"GET /apis/kueue.x-k8s.io/{served[-1]}/namespaces" in "".join(server.requests)


def test_a_queue_where_there_is_no_kueue(api, server):
    job(server, suspend=True)["metadata"]["labels"] = {**LABELS, "kueue.x-k8s.io/queue-name": "team-a"}
    server.missing.add("workloads")
    assert why_pending(api, LABELS) == (
        "Job g is suspended: it waits in the queue team-a, and this cluster has no Kueue; install it "
        "(kueue.sigs.k8s.io), or take `kubernetes.queue` out"
    )


@pytest.mark.parametrize("how", ["missing", "denied"])
def test_a_suspended_gang_without_a_word_of_kueue(api, server, how):
    job(server, suspend=True)
    if how == "missing":
        server.missing.add("workloads")
    else:
        server.denied.add("list workloads")
    assert why_pending(api, LABELS) == "Job g is suspended: its queue has not admitted it"


def test_a_pod_that_outlives_its_grace_period_has_lost_its_node(api, server):
    late = pod(server, phase="Running")
    for seconds, told in ((-60, False), (5, False), (100, True)):
        gone = datetime.fromtimestamp(time.time() - seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        late["metadata"]["deletionTimestamp"] = gone
        found = why_pending(api, LABELS)
        assert bool(found) == told
    assert re.match(r"pod p should have ended 1\d\d s ago, and node n1 does not say", found)


def test_nothing_to_say(api, server):
    assert why_pending(api, LABELS) == ""
    job(server)
    assert why_pending(api, LABELS) == ""
    pod(server, containerStatuses=waiting("PodInitializing"))
    assert why_pending(api, LABELS) == ""
    pod(server, conditions=[{"type": "PodScheduled", "status": "False", "reason": "SchedulerError"}])
    assert why_pending(api, LABELS) == "pod p waits: SchedulerError"


def test_a_container_that_fails_again_and_again_says_why(api, server):
    """As a driver's, whose pod counts as running meanwhile."""
    (crashed,) = waiting("CrashLoopBackOff", "back-off 20s restarting failed container=driver")
    words = "Traceback ...\nModuleNotFoundError: No module named 'mlpipe'\n\n"
    crashed["lastState"] = {"terminated": {"exitCode": 1, "message": words}}
    pod(server, phase="Running", containerStatuses=[crashed])
    assert why_pending(api, LABELS) == (
        "pod p waits: it fails again and again: ModuleNotFoundError: No module named 'mlpipe'; the image lacks "
        "it: is it built from mlpipe's Containerfile?"
    )


def test_what_nobody_foresaw_is_told_as_it_is(api, server):
    pod(server, conditions=unscheduled("0/1 nodes are available: 1 node(s) sang.\nsecond line"))
    assert why_pending(api, LABELS) == "pod p waits: 0/1 nodes are available: 1 node(s) sang"


def test_a_missing_right_is_told_by_the_caller(api, server):
    server.denied.add("list pods")
    with pytest.raises(ApiError, match="you may not list Pods"):
        why_pending(api, LABELS)


def test_every_remedy_has_a_case():
    messages = [*SCHEDULER, *ADMISSION, *KUEUE, *(case[1] for case in [*CONTAINERS, *MOUNTS])]
    assert {pending._first(pending._REMEDIES, found) for found in messages} >= set(pending._REMEDIES.values())
    pulls = {pending._first(pending._PULLS, message) for _, message, _ in IMAGES}
    assert pulls >= set(pending._PULLS.values())
