"""The kit's cluster is a real one, shown with plain objects; its faults, JobSet, Kueue by tests of runs."""

from __future__ import annotations

import json

import pytest
from kit.cluster import ClusterError
from kit.cluster_objects import job, named, pod_template

pytestmark = pytest.mark.cluster

DONE_SECONDS = 240  # of a few seconds' work, on a machine that others use, too

ALL_REDUCE = """
import os
import torch
import torch.distributed as dist
from minio import Minio

dist.init_process_group("gloo")
rank = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(rank)
assert rank.item() == 3, rank
if dist.get_rank() == 0:
    client = Minio(
        os.environ["AWS_ENDPOINT_URL_S3"].removeprefix("http://"),
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        secure=False,
    )
    client.fput_object(os.environ["BUCKET"], "sum", __file__)
dist.barrier()
print("all reduced", flush=True)
os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
"""

ASK_API = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
request = urllib.request.Request(
    f"https://{host}:{port}/version", headers={"Authorization": "Bearer " + open(folder + "/token").read()}
)
trusted = ssl.create_default_context(cafile=folder + "/ca.crt")
print(urllib.request.urlopen(request, context=trusted, timeout=30).read().decode())
"""


def test_a_node_is_ready_and_of_the_version_asked_for(running):
    node = running.get("/api/v1/nodes/node-0")
    assert node["status"]["nodeInfo"]["kubeletVersion"] == "v1.36.3"


def test_a_gang_reduces_over_torchrun_and_stores_an_object(running, namespace):
    bucket = running.make_bucket(namespace)
    torchrun = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=gang"]
    pod = pod_template(
        running.image.name, [*torchrun, "--rdzv-endpoint=gang-0.gang:29500", "/script/work.py"]
    )
    pod["spec"]["subdomain"] = "gang"
    pod["spec"]["volumes"].append({"name": "script", "configMap": {"name": "gang"}})
    container = pod["spec"]["containers"][0]
    container["volumeMounts"].append({"name": "script", "mountPath": "/script"})
    environment = {**running.minio.environment(), "BUCKET": bucket}
    container["env"] = [{"name": name, "value": value} for name, value in environment.items()]
    service = {"clusterIP": "None", "selector": {"app": "test"}, "publishNotReadyAddresses": True}
    running.apply(
        named("v1", "ConfigMap", "gang", namespace, data={"work.py": ALL_REDUCE}),
        named("v1", "Service", "gang", namespace, spec=service),
        job("gang", namespace, pod, num_pods=2),
    )
    running.wait_for_job("gang", namespace, DONE_SECONDS)
    assert "all reduced" in running.kubectl("logs", "-n", namespace, "job/gang")
    assert (running.minio.data / bucket / "sum").exists()


def test_fake_gpus_are_scheduled_and_fall_ill(running, namespace):
    running.set_gpus(0, 8)
    running.set_gpus(0, 8, healthy=2)
    pod = pod_template(running.image.name, ["sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"])
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 2}}
    running.apply(job("gpus", namespace, pod))
    running.wait_for_job("gpus", namespace, DONE_SECONDS)
    seen = running.kubectl("logs", "-n", namespace, "job/gpus").strip().split(",")
    assert sorted(seen) == ["GPU-0", "GPU-1"]


def test_a_pod_reaches_the_api_server_as_its_service_account(running, namespace):
    pod = pod_template(running.image.by_digest, ["python", "-c", ASK_API])
    running.apply(job("ask", namespace, pod))
    running.wait_for_job("ask", namespace, DONE_SECONDS)
    assert json.loads(running.kubectl("logs", "-n", namespace, "job/ask"))["gitVersion"] == "v1.36.3"


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
