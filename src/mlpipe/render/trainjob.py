"""The pod template of a gang as a TrainJob of Kubeflow Trainer, which says what the platform's runtime may be
told of one job. All else is the runtime's (docs/how-to/trainjobs.md has one); what only a pod template of
ours could say is refused, here and in `spec/kubernetes_rules.py`.

Field names: pkg/apis/trainer/v1alpha1/trainjob_types.go of github.com/kubeflow/trainer, v2.1 and v2.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mlpipe._core.errors import RenderError
from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.plan import Plan
from mlpipe.render.pod import TRAINJOBS_CONTAINER

# The same for every gang: docs/how-to/trainjobs.md tells the platform what to write into its runtime.
_RUNTIMES_OWN = {
    "automountServiceAccountToken",
    "enableServiceLinks",
    "restartPolicy",
    "securityContext",
    "terminationGracePeriodSeconds",
    "topologySpreadConstraints",
}
_CARRIED = (
    "serviceAccountName",
    "nodeSelector",
    "affinity",
    "tolerations",
    "volumes",
    "imagePullSecrets",
)
_CONTAINERS_OWN = {"imagePullPolicy", "ports", "securityContext", "terminationMessagePolicy"}
_TRAINERS = ("image", "command", "args", "env")
Json = dict[str, Any]


def trainjob_spec(plan: Plan, cluster: ClusterPlan, labels: Mapping[str, str], template: Json) -> Json:
    """`labels`: of the JobSet and its Job. `template`: of the pod, as for a JobSet, with its own patches.
    Raises RenderError for what a TrainJob cannot say."""
    own, where, seconds = cluster.trainjob, f"stage {plan.stage!r}", plan.launch.timeout_seconds
    if own is None:
        raise RenderError(
            "a TrainJob names the runtime that it is made from",
            where=where,
            hint="add 'kubernetes: {trainjob: {runtime: NAME}}'",
        )
    (container,) = template["spec"]["containers"]
    _refuse_rest(where, template["spec"], container)
    pod = {key: template["spec"][key] for key in _CARRIED if key in template["spec"]}
    pod["containers"] = [{"name": TRAINJOBS_CONTAINER, "volumeMounts": container["volumeMounts"]}]
    pods = {"metadata": template["metadata"], "spec": pod}
    spec: Json = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": own.kind, "name": own.runtime},
        "trainer": {
            "numNodes": plan.launch.num_machines,
            **{key: container[key] for key in _TRAINERS},
            "resourcesPerNode": container["resources"],
        },
    }
    if own.overrides == "podTemplateOverrides":
        override = {"targetJobs": [{"name": TRAINJOBS_CONTAINER}], **pods}
        return spec | {"labels": dict(labels), "podTemplateOverrides": [override]}
    if seconds is not None:  # beside the driver's; 2.1 has none
        spec["activeDeadlineSeconds"] = max(1, math.ceil(seconds))
    job = {"metadata": {"labels": dict(labels)}, "spec": {"template": pods}}
    jobs = [{"name": TRAINJOBS_CONTAINER, "template": job}]
    jobset = {"metadata": {"labels": dict(labels)}, "spec": {"replicatedJobs": jobs}}
    patch = {"manager": "mlpipe.dev/render", "trainingRuntimeSpec": {"template": jobset}}
    return spec | {"runtimePatches": [patch]}


def pod_of(spec: Json) -> Json:
    """Spec of its pods, as far as a TrainJob says it: where they may stand, and what each asks for."""
    if "runtimePatches" in spec:
        (patch,) = spec["runtimePatches"]
        (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        pod = job["template"]["spec"]["template"]["spec"]
    else:
        pod = spec["podTemplateOverrides"][0]["spec"]
    return {**pod, "containers": [{"resources": spec["trainer"]["resourcesPerNode"]}]}


def _refuse_rest(where: str, pod: Json, container: Json) -> None:
    """What nobody would carry, and nobody would miss before the pods do."""
    rest = sorted(pod.keys() - _RUNTIMES_OWN - {*_CARRIED, "containers"})
    known = {*_TRAINERS, *_CONTAINERS_OWN, "name", "resources", "volumeMounts"}
    rest += sorted(f"containers[0].{key}" for key in container.keys() - known)
    if rest:
        raise RenderError(
            f"a TrainJob cannot say {', '.join(rest)} of its pods",
            where=where,
            hint="write it into the runtime, or take another kubernetes.form",
        )
