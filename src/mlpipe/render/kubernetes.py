"""A Plan to the objects that run it on a cluster, as plain dicts in the order of their creation.

Pure functions of their arguments. What is returned is what is sent: `render` prints it, `submit` creates it
(and adds ownerReferences, which need the server's uids). Each object carries the sha256 of itself, so that
whoever finds its name taken can tell whether it is the very same object.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mlpipe._core import environment
from mlpipe._core.errors import NON_RETRIABLE_CODES, SAVED_CODE, RenderError
from mlpipe.plan.cluster import ClusterPlan, Component, GpuClaims
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.render import names
from mlpipe.render.names import gang_name, labels
from mlpipe.render.patches import patched, pod_holders
from mlpipe.render.pod import (
    CLAIM,
    CONTAINER,
    TRAINJOBS_CONTAINER,
    coordinator_template,
    driver_template,
    is_gang,
    worker_template,
)

__all__ = ["driver_objects", "gang_name", "labels", "replica_object", "stage_objects"]
# Of the pods' names: the JobSet's job and its replica, between the gang's name and the index
_OF_JOBSET = {"jobset": f"{CONTAINER}-0-", "trainjob": f"{TRAINJOBS_CONTAINER}-0-"}
MAX_CONFIG_BYTES = 2**20  # of a ConfigMap's data
MAX_IN_POD_BYTES = 128 * 2**10  # half of what all annotations of a pod may have
DRIVER_RETRIES = 100  # a driver that starts anew takes over where the last one was
COORDINATOR_RETRIES = 100  # its node may be lost, drained or taken back now and then
Json = dict[str, Any]


def stage_objects(plan: Plan) -> list[Json]:
    """A ConfigMap with the plan, unless the pods bring it, what the gang needs beside it, and the Job, JobSet
    or TrainJob; none for a stage that the driver does itself. Of an elastic training: the coordinator's Job,
    then one for each replica. Raises RenderError."""
    cluster = plan.cluster
    if cluster is None:
        raise RenderError(
            f"{plan.pipeline!r} says nothing of a cluster",
            where=plan.stage,
            hint="add 'image: registry.example.com/team/mlpipe:1.0'",
        )
    if plan.kind.runs == "driver":
        return []
    name, own = gang_name(plan), labels(plan.run_id, plan.stage, plan.attempt, "worker")
    text = plan.to_json()
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise RenderError(
            f"plan.json has {len(text.encode())} bytes, a ConfigMap takes {MAX_CONFIG_BYTES}",
            where=plan.stage,
            hint="shorten the arguments of the stage, or read them from a file",
        )
    form = cluster.form if is_gang(plan) else "job"
    config, objects, brought = None, [], text
    if not _brings_plan(plan, cluster, form, text):
        brought = ""
        config = names.config_name(name, text)
        head = _head("v1", "ConfigMap", config, cluster, own)
        objects.append({**head, "immutable": True, "data": {"plan.json": text}})
    if cluster.gpu_claims is not None:
        objects.append(_claim_template(cluster.gpu_claims, name, cluster, own))
    if plan.launch.replicas is not None:
        assert config is not None
        count = plan.launch.replicas.most
        objects.append(_coordinator_job(plan, name, cluster, own, config))
        objects += [_replica_job(plan, number, cluster, own, config) for number in range(count)]
        return _finish(objects, plan.stage, "worker", cluster, plan.spec_digest)
    first = f"{name}-{_OF_JOBSET.get(form, '')}0.{name}"
    pod_labels = own | {"sidecar.istio.io/inject": "false"}
    template = worker_template(plan, cluster, pod_labels, config, first)
    _queue_pod(template, name, cluster, plan)
    if form == "indexed-job":
        objects.append(_service(name, cluster, own))
    if cluster.volcano_queue is not None:
        group = {"minMember": plan.launch.num_machines, "queue": cluster.volcano_queue}
        objects.append(
            {**_head("scheduling.volcano.sh/v1beta1", "PodGroup", name, cluster, own), "spec": group}
        )
    if cluster.groups:
        objects.append(_jobset_of_groups(plan, name, cluster, own, (config, first)))
        return _finish(objects, plan.stage, "worker", cluster, plan.spec_digest, brought)
    of_form = {"jobset": _jobset, "trainjob": _trainjob}.get(form, _job)
    objects.append(of_form(plan, name, cluster, own, template))
    return _finish(objects, plan.stage, "worker", cluster, plan.spec_digest, brought)


def _brings_plan(plan: Plan, cluster: ClusterPlan, form: str, text: str) -> bool:
    """Whether the pods have the plan with them: the queue may be one of MultiKueue's, which sends a gang to
    another cluster, and nothing else."""
    alone = cluster.queue is not None and plan.launch.replicas is None and form in ("job", "jobset")
    alone &= not any(patch.kind == "ConfigMap" for patch in cluster.patches)  # which is the plan's
    return alone and len(text.encode()) * max(1, len(cluster.groups)) <= MAX_IN_POD_BYTES


def replica_object(plan: Plan, number: int, avoid: Sequence[str] = ()) -> Json:
    """The Job of that replica of an elastic training, which may have a higher number than `stage_objects`
    gives: a node that is lost keeps its own. `avoid`: nodes besides those that the plan avoids."""
    cluster, config = plan.cluster, names.config_name(gang_name(plan), plan.to_json())
    plan = replace(plan, launch=plan.launch._replace(avoid=(*plan.launch.avoid, *avoid)))
    assert cluster is not None
    own = labels(plan.run_id, plan.stage, plan.attempt, "worker")
    body = _replica_job(plan, number, cluster, own, config)
    return _finish([body], plan.stage, "worker", cluster, plan.spec_digest)[0]


def driver_objects(
    run_id: str, store_url: str, cluster: ClusterPlan, *, stage: str | None, spec_digest: str, seal: str
) -> list[Json]:
    """The Job that drives the run, or one stage of it. Of `cluster` only what concerns the whole run is read.
    `spec_digest`: of the resolved pipeline. `seal`: see `driver_template`. Raises RenderError."""
    own = labels(run_id, stage, None, "driver")
    pod_labels = own | {"sidecar.istio.io/inject": "false"}
    cluster = cluster.of_run()
    spec = {
        "backoffLimit": DRIVER_RETRIES,
        "completions": 1,
        "parallelism": 1,
        "ttlSecondsAfterFinished": cluster.ttl_seconds,
        "template": driver_template(run_id, store_url, cluster, pod_labels, stage, seal),
    }
    head = _head("batch/v1", "Job", names.driver_name(run_id, stage), cluster, own)
    return _finish([{**head, "spec": spec}], stage, "driver", cluster, spec_digest)


def object_digest(document: Json) -> str:
    """sha256 of the object's canonical JSON, without the annotation that holds it."""
    metadata = dict(document["metadata"])
    metadata["annotations"] = {
        key: value for key, value in metadata.get("annotations", {}).items() if key != names.SPEC_DIGEST
    }
    text = json.dumps({**document, "metadata": metadata}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _finish(
    objects: list[Json],
    stage: str | None,
    component: Component,
    cluster: ClusterPlan,
    pipeline_digest: str,
    brought: str = "",
) -> list[Json]:
    """`brought`: the plan, where the pods have it with them, whatever a patch made of their annotations."""
    for document in objects:
        document["metadata"]["annotations"] = {names.PIPELINE_DIGEST: pipeline_digest}
    objects = patched(objects, cluster.patches, stage, component)
    for document in objects:
        for holder in pod_holders(document) if brought else ():
            holder["template"]["metadata"].setdefault("annotations", {})[names.PLAN] = brought
        annotations = document["metadata"].setdefault("annotations", {})
        annotations[names.SPEC_DIGEST] = object_digest(document)
    return objects


def _head(version: str, kind: str, name: str, cluster: ClusterPlan, own: dict[str, str]) -> Json:
    metadata: Json = {"name": name, "labels": dict(own)}
    if cluster.namespace is not None:
        metadata = {"name": name, "namespace": cluster.namespace, "labels": dict(own)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _service(name: str, cluster: ClusterPlan, own: dict[str, str]) -> Json:
    """Headless: only names. Before the pods are ready too, since they meet before they are."""
    selector = {key: own[key] for key in (names.RUN, names.STAGE, names.ATTEMPT)}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    return {**_head("v1", "Service", name, cluster, own), "spec": spec}


def _claim_template(claims: GpuClaims, name: str, cluster: ClusterPlan, own: dict[str, str]) -> Json:
    """Each pod is given a claim of its own by it, which ends with the pod."""
    exactly: Json = {
        "deviceClassName": claims.device_class,
        "allocationMode": "ExactCount",
        "count": cluster.gpus_per_node,
    }
    if claims.expression is not None:
        exactly["selectors"] = [{"cel": {"expression": claims.expression}}]
    requests = [{"name": CLAIM, "exactly": exactly}]
    head = _head("resource.k8s.io/v1", "ResourceClaimTemplate", name, cluster, own)
    return {**head, "spec": {"spec": {"devices": {"requests": requests}}}}


def _queued(head: Json, cluster: ClusterPlan) -> Json:
    """Kueue admits what is created suspended and has its label."""
    if cluster.queue is None:
        return {}
    head["metadata"]["labels"][names.QUEUE] = cluster.queue
    if cluster.queue_priority is not None:
        head["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] = cluster.queue_priority
    return {"suspend": True}


def inner_nodes(plan: Plan, most: int | None = None) -> int | None:
    """Nodes of one group of ranks that share weights, or, if `most` are as many, of one pipeline of such
    groups: neighbours by place, as Kueue counts pods by index. None for a stage that does not train on
    several nodes, where a node belongs to two groups, and on machines that differ, of which Kueue places each
    class by itself."""
    training = plan.part(TrainPlan)
    if training is None or plan.launch.num_nodes == 1 or plan.launch.replicas is not None or training.groups:
        return None
    nodes = training.mesh.nodes_of_weights(plan.launch.nproc_per_node)
    pipeline = 0 if nodes is None else nodes * training.mesh.pp
    return pipeline if 0 < pipeline <= (most or 0) else nodes


def _queue_pod(template: Json, name: str, cluster: ClusterPlan, plan: Plan) -> None:
    annotations = template["metadata"]["annotations"]
    if cluster.topology is not None:
        how = "required" if cluster.topology.required else "preferred"
        annotations[f"kueue.x-k8s.io/podset-{how}-topology"] = cluster.topology.label
        nodes = inner_nodes(plan, cluster.topology.inner_nodes)
        if cluster.topology.inner is not None and nodes is not None:
            annotations["kueue.x-k8s.io/podset-slice-required-topology"] = cluster.topology.inner
            annotations["kueue.x-k8s.io/podset-slice-size"] = str(nodes)
    if cluster.volcano_queue is not None:
        annotations["scheduling.k8s.io/group-name"] = name
        template["spec"]["schedulerName"] = "volcano"


def _job(plan: Plan, name: str, cluster: ClusterPlan, own: dict[str, str], template: Json) -> Json:
    """What would come again fails it at once, a disruption is free, the rest is counted by pods."""
    nodes, head = plan.launch.num_machines, _head("batch/v1", "Job", name, cluster, own)
    spec: Json = _queued(head, cluster) | {"completions": nodes, "parallelism": nodes}
    if is_gang(plan):
        spec["completionMode"] = "Indexed"
        template["spec"]["subdomain"] = name
    spec["backoffLimit"] = cluster.max_gang_restarts * nodes
    # A queue that takes a Job back deletes its pods, which are not marked as disrupted. A command's codes are
    # its own.
    saved = [_exit_codes((SAVED_CODE,), "Ignore")] if plan.kind.runs == "workers" else []
    disrupted = {"action": "Ignore", "onPodConditions": [_DISRUPTED]}
    spec["podFailurePolicy"] = {"rules": [_exit_codes(NON_RETRIABLE_CODES), *saved, disrupted]}
    spec |= _deadline(plan) | {"podReplacementPolicy": "Failed"}
    spec["ttlSecondsAfterFinished"] = cluster.ttl_seconds
    return {**head, "spec": spec | {"template": template}}


def _jobset_of_groups(
    plan: Plan, name: str, cluster: ClusterPlan, own: dict[str, str], of_pod: tuple[str | None, str]
) -> Json:
    """A job for each group, whose first node has the number that follows the last one of the group before.
    `of_pod`: ConfigMap and rendezvous."""
    jobs, first, found = [], 0, {}
    for number, group in enumerate(cluster.groups):
        pods = cluster.of_group(number)
        template = worker_template(plan, pods, own | {"sidecar.istio.io/inject": "false"}, *of_pod)
        _queue_pod(template, name, pods, plan)
        template["spec"]["containers"][0]["env"].append({"name": environment.FIRST_NODE, "value": str(first)})
        found = _jobset(plan, name, cluster, own, template)
        (job,) = found["spec"]["replicatedJobs"]
        job["template"]["spec"] |= {"completions": group.num_nodes, "parallelism": group.num_nodes}
        jobs.append(job | {"name": CONTAINER if number == 0 else f"g{number}"})
        first += group.num_nodes
    found["spec"]["replicatedJobs"] = jobs
    return found


def _jobset(plan: Plan, name: str, cluster: ClusterPlan, own: dict[str, str], template: Json) -> Json:
    """Every failure ends the Job; what its message says decides what becomes of the gang."""
    nodes = plan.launch.num_machines
    rules = [
        {
            "name": "nonRetriable",
            "action": "FailJobSet",
            "onJobFailureMessagePatterns": [f"exit code {code} " for code in NON_RETRIABLE_CODES],
        },
        {
            "name": "disruption",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureMessagePatterns": ["condition DisruptionTarget", f"exit code {SAVED_CODE} "],
        },
    ]
    if plan.launch.timeout_seconds is not None:
        overdue = {"name": "overdue", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
        rules.insert(0, overdue)
    job: Json = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                _exit_codes((*NON_RETRIABLE_CODES, SAVED_CODE)),
                {"action": "FailJob", "onPodConditions": [_DISRUPTED]},
            ]
        },
        **_deadline(plan),
        "podReplacementPolicy": "Failed",
        "template": template,
    }
    head = _head("jobset.x-k8s.io/v1alpha2", "JobSet", name, cluster, own)
    spec = _queued(head, cluster) | {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {"maxRestarts": cluster.max_gang_restarts, "rules": rules},
        "ttlSecondsAfterFinished": cluster.ttl_seconds,
        "replicatedJobs": [
            {"name": CONTAINER, "replicas": 1, "template": {"metadata": {"labels": dict(own)}, "spec": job}}
        ],
    }
    return {**head, "spec": spec}


def _trainjob(plan: Plan, name: str, cluster: ClusterPlan, own: dict[str, str], template: Json) -> Json:
    """Patches of the pod come first: what they add is carried, or refused, like the rest."""
    from mlpipe.render.trainjob import trainjob_spec

    (holder,) = patched(
        [{"kind": "PodTemplate", "spec": {"template": template}}], cluster.patches, plan.stage, "worker"
    )
    head = _head("trainer.kubeflow.org/v1alpha1", "TrainJob", name, cluster, own)
    return {
        **head,
        "spec": _queued(head, cluster) | trainjob_spec(plan, cluster, own, holder["spec"]["template"]),
    }


def _coordinator_job(plan: Plan, name: str, cluster: ClusterPlan, own: dict[str, str], config: str) -> Json:
    """One that is lost is replaced at once, before its node is known to be dead: it has a lease."""
    head = _head("batch/v1", "Job", name, cluster, own)
    spec: Json = _queued(head, cluster) | {"completions": 1, "parallelism": 1}
    spec |= {"backoffLimit": COORDINATOR_RETRIES, "ttlSecondsAfterFinished": cluster.ttl_seconds}
    pod_labels = own | {"sidecar.istio.io/inject": "false"}
    return {**head, "spec": spec | {"template": coordinator_template(plan, cluster, pod_labels, config)}}


def _replica_job(plan: Plan, number: int, cluster: ClusterPlan, own: dict[str, str], config: str) -> Json:
    """By itself, so that what befalls its node, or a queue that takes it back, befalls no other."""
    alone = cluster._replace(form="indexed-job")
    template = worker_template(plan, alone, own | {"sidecar.istio.io/inject": "false"}, config, "")
    numbered = own | {names.REPLICA: str(number)}
    template["metadata"]["labels"] |= {names.REPLICA: str(number)}
    variable = {"name": environment.REPLICA, "value": str(number)}
    template["spec"]["containers"][0]["env"].append(variable)
    name = f"{gang_name(plan)}-{number}"
    _queue_pod(template, name, cluster, plan)
    return _job(plan, name, cluster, numbered, template)


_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}


def _exit_codes(codes: tuple[int, ...], action: str = "FailJob") -> Json:
    condition = {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}  # the API wants it so
    return {"action": action, "onExitCodes": condition}


def _deadline(plan: Plan) -> Json:
    seconds = plan.launch.timeout_seconds
    return {} if seconds is None else {"activeDeadlineSeconds": max(1, math.ceil(seconds))}
