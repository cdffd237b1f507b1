"""The kit's cluster is a real one, shown with plain objects. Gangs, drivers that ask its API, its faults,
JobSet and Kueue: by tests of runs."""

from __future__ import annotations

import pytest
from kit.cluster import ClusterError
from kit.cluster_objects import job, named, pod_template

pytestmark = pytest.mark.cluster

DONE_SECONDS = 240  # of a few seconds' work, on a machine that others use, too


def test_a_node_is_ready_and_of_the_version_asked_for(running):
    node = running.get("/api/v1/nodes/node-0")
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"


def test_fake_gpus_are_scheduled_and_fall_ill(running, namespace):
    running.set_gpus(0, 8)
    running.set_gpus(0, 8, healthy=2)
    pod = pod_template(running.image.name, ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"])
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    running.apply(job("gpus", namespace, pod))
    running.wait_for_job("gpus", namespace, DONE_SECONDS)
    seen = running.kubectl("logs", "-n", namespace, "job/gpus").strip().split(",")
    assert sorted(seen) == ["GPU-0", "GPU-1"]


def test_rights_are_those_of_the_account(running, namespace):
    environment = {**running.environment(), "KUBECONFIG": str(running.kubeconfig_for("default", namespace))}
    done = running.run(["kubectl", "get", "pods"], env=environment, timeout=60)
    assert done.returncode
    assert f"system:serviceaccount:{namespace}:default" in done.stderr


def test_restricted_is_enforced(running, namespace):
    pod = pod_template(running.image.name, ["true"])
    pod["spec"]["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    with pytest.raises(ClusterError, match="violates PodSecurity"):
        running.apply(named("v1", "Pod", "bad", namespace, spec=pod["spec"]))
