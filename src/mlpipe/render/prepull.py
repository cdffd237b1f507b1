"""Jobs that fetch a stage's image onto nodes of its kind while the stages before it run: a pod of each does
nothing, but has the image. They ask for no device, wait in no queue, and end by themselves.

Their pods are those of the stage, as its patches leave them, without all that is of its work: the same
selector, affinity and tolerations, the same user and no more rights. Which of such nodes the gang gets later
is the scheduler's to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.plan import Plan
from mlpipe.render import names
from mlpipe.render.kubernetes import object_digest, stage_objects
from mlpipe.render.pod import CONTAINER

DEADLINE_SECONDS = 3600  # of all: a node that is not free by then is not waited for
ENDED_SECONDS = 600  # how long one that has ended stays to be looked at
_KEPT = (
    "serviceAccountName",
    "automountServiceAccountToken",
    "enableServiceLinks",
    "securityContext",
    "imagePullSecrets",
    "nodeSelector",
    "affinity",
    "tolerations",
    "runtimeClassName",
)
Json = dict[str, Any]


def prepull_objects(plans: Sequence[Plan], waiting: Sequence[str], pipeline_digest: str) -> list[Json]:
    """`plans`: of all stages of a run. `waiting`: those that do not start at once. Of stages whose pods stand
    on the same nodes the one with most. Raises RenderError."""
    jobs: dict[str, Json] = {}
    for plan in plans:
        cluster = plan.cluster
        if cluster is None or not cluster.prepull or plan.stage not in waiting:
            continue
        for body in stage_objects(plan)[-1:]:  # none of a stage that the driver does itself
            job = _job(plan, cluster, body, pipeline_digest)
            pod = job["spec"]["template"]["spec"] | {"topologySpreadConstraints": []}
            where = json.dumps(pod, sort_keys=True)
            if where not in jobs or jobs[where]["spec"]["parallelism"] < job["spec"]["parallelism"]:
                jobs[where] = job
    return list(jobs.values())


def _job(plan: Plan, cluster: ClusterPlan, gang: Json, pipeline_digest: str) -> Json:
    if gang["kind"] == "JobSet":
        gang = gang["spec"]["replicatedJobs"][0]["template"]
    pod = gang["spec"]["template"]["spec"]
    (worker,) = (one for one in pod["containers"] if one["name"] == CONTAINER)
    rights = {**worker["securityContext"], "capabilities": {"drop": ["ALL"]}}
    small = {"cpu": "10m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
    container = {
        "name": "pull",
        "image": worker["image"],
        "imagePullPolicy": worker["imagePullPolicy"],
        "command": ["python", "-c", "pass"],
        "resources": {"requests": small, "limits": {"memory": "256Mi", "ephemeral-storage": "64Mi"}},
        "securityContext": rights,
    }
    own = names.labels(plan.run_id, None, None, "worker")
    pods = own | {names.PULLS: names.label_value(plan.stage), "sidecar.istio.io/inject": "false"}
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {key: pods[key] for key in (names.RUN, names.PULLS)}},
    }
    template = {key: pod[key] for key in _KEPT if key in pod}
    template |= {"restartPolicy": "Never", "containers": [container], "topologySpreadConstraints": [spread]}
    replicas = plan.launch.replicas
    count = plan.launch.num_machines if replicas is None else replicas.most
    spec = {
        "completions": count,
        "parallelism": count,
        "backoffLimit": count,
        "activeDeadlineSeconds": DEADLINE_SECONDS,
        "ttlSecondsAfterFinished": ENDED_SECONDS,
        "template": {"metadata": {"labels": pods}, "spec": template},
    }
    digest = hashlib.sha256(json.dumps([own, spec], sort_keys=True).encode()).hexdigest()[:8]
    metadata: Json = {"name": f"{names.pull_name(plan.run_id, plan.stage)}-{digest}"}
    if cluster.namespace is not None:
        metadata["namespace"] = cluster.namespace
    metadata |= {"labels": own, "annotations": {names.PIPELINE_DIGEST: pipeline_digest}}
    job: Json = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    metadata["annotations"][names.SPEC_DIGEST] = object_digest(job)
    return job
