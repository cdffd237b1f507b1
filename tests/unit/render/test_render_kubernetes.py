"""What every object of every stage keeps to, whatever the pipeline says."""

from __future__ import annotations

import copy
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from kit.rendered import PIPELINES, QUICKSTART, RUN_ID, pipeline_of, plan_of

from mlpipe._core.errors import RenderError
from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.slurm import slurm_job
from mlpipe.render.kubernetes import driver_objects, gang_name, object_digest, replica_object, stage_objects
from mlpipe.render.names import SPEC_DIGEST
from mlpipe.render.pod import quantity
from mlpipe.render.prepull import prepull_objects
from mlpipe.render.slurm import script
from mlpipe.spec.model import Pipeline
from mlpipe.submit.kubernetes.manifests import waiting

pytestmark = pytest.mark.unit
Json = dict[str, Any]
SHIPPED = sorted(str(path.relative_to(PIPELINES))[: -len(".yaml")] for path in PIPELINES.rglob("*.yaml"))


def with_pods(pipeline: Pipeline) -> list[str]:
    """Names of the stages that the driver does not do by itself."""
    return [stage.name for stage in pipeline.stages if stage.kind.runs != "driver"]


def shipped(name: str, form: str = "jobset") -> Pipeline:
    """The pipeline as it is, with an image and an S3 store where it has none."""
    overrides = [f"kubernetes.form={form}"]
    pipeline = pipeline_of(name)
    if pipeline.image is None:
        overrides.append("image=registry.example.com/team/mlpipe:1.0")
    if not pipeline.store.startswith("s3://"):
        overrides.append("store=s3://ml-runs/x")
    return pipeline_of(name, *overrides)


def quickstart(stage: str = "train", *overrides: str) -> Plan:
    return plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), stage)


def cluster_of(plan: Plan) -> ClusterPlan:
    assert plan.cluster is not None
    return plan.cluster


def job_of(found: Json) -> Json:
    """The spec of the Job: its own, or that inside a JobSet."""
    if found["kind"] == "JobSet":
        found = found["spec"]["replicatedJobs"][0]["template"]
    spec: Json = found["spec"]
    return spec


def pod_of(found: Json) -> Json:
    spec: Json = job_of(found)["template"]["spec"]
    return spec


def variables(plan: Plan) -> dict[str, Any]:
    env = pod_of(stage_objects(plan)[-1])["containers"][0]["env"]
    names = [found["name"] for found in env]
    assert len(names) == len(set(names))
    return {found["name"]: found.get("value", found.get("valueFrom")) for found in env}


@pytest.fixture(scope="module", params=itertools.product(SHIPPED, ("jobset", "indexed-job")), ids="-".join)
def everything(request: pytest.FixtureRequest) -> list[list[Json]]:
    """Of a shipped pipeline: the objects of each stage, and those of the driver."""
    name, form = request.param
    pipeline = shipped(name, form)
    plans = [plan_of(pipeline, name) for name in with_pods(pipeline)]
    cluster, digest = cluster_of(plans[0]), pipeline.digest
    driver = driver_objects(
        RUN_ID, plans[0].store_url, cluster, stage=None, spec_digest=digest, seal="TEXT:SET"
    )
    return [*map(stage_objects, plans), driver]


def test_pods_are_restricted(everything: list[list[Json]]) -> None:
    """Pod Security's level `restricted`, and a root file system that nobody writes."""
    for objects in everything:
        spec = pod_of(objects[-1])
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 10_000
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert all(
            volume.keys() <= {"name", "emptyDir", "configMap", "persistentVolumeClaim"}
            for volume in spec["volumes"]
        )
        (container,) = spec["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted >= {"/tmp", "/mlpipe/cache"}
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }


def test_only_the_driver_has_a_token(everything: list[list[Json]]) -> None:
    for objects in everything:
        spec = pod_of(objects[-1])
        driver = spec["containers"][0]["name"] == "driver"
        assert spec["automountServiceAccountToken"] is driver
        assert spec["serviceAccountName"] == ("mlpipe-driver" if driver else "mlpipe-worker")
        assert "Secret" not in {found["kind"] for found in objects}
        for variable in spec["containers"][0]["env"]:
            if variable["name"].startswith(("AWS_ACCESS", "AWS_SECRET", "AWS_SESSION")):
                optional = {"optional": True} if variable["name"] == "AWS_SESSION_TOKEN" else {}
                key = {"name": "mlpipe-store", "key": variable["name"], **optional}
                assert variable["valueFrom"]["secretKeyRef"] == key


def test_objects_are_found_again_by_labels_and_digest(everything: list[list[Json]]) -> None:
    for objects in everything:
        for found in objects:
            metadata = found["metadata"]
            assert metadata["labels"]["mlpipe.dev/run"] == RUN_ID
            assert metadata["labels"]["app.kubernetes.io/managed-by"] == "mlpipe"
            assert metadata["annotations"][SPEC_DIGEST] == object_digest(found)
            other = copy.deepcopy(found)
            other["metadata"]["labels"]["a"] = "b"
            assert object_digest(other) != object_digest(found)
        template = job_of(objects[-1])["template"]["metadata"]
        assert template["labels"].items() >= {"mlpipe.dev/run": RUN_ID}.items()
        assert template["annotations"]["sidecar.istio.io/inject"] == "false"


@pytest.mark.parametrize("name", SHIPPED)
def test_the_plan_travels_whole(name: str) -> None:
    pipeline = shipped(name)
    for name in with_pods(pipeline):
        plan = plan_of(pipeline, name)
        config, *_, last = stage_objects(plan)
        assert config["immutable"] is True
        assert Plan.from_json(config["data"]["plan.json"]) == plan
        volumes = {volume["name"]: volume for volume in pod_of(last)["volumes"]}
        assert volumes["plan"]["configMap"]["name"] == config["metadata"]["name"]
        changed = replace(plan, spec_digest="f" * 64)
        assert stage_objects(changed)[0]["metadata"]["name"] != config["metadata"]["name"]


def test_a_gang_in_each_form() -> None:
    plan = quickstart()
    config, jobset = stage_objects(plan)
    assert (config["kind"], jobset["kind"]) == ("ConfigMap", "JobSet")
    assert jobset["spec"]["network"]["publishNotReadyAddresses"] is True
    name = gang_name(plan)
    assert variables(plan)["MLPIPE_RENDEZVOUS"] == f"{name}-worker-0-0.{name}:29500"
    assert "MLPIPE_GANG_RESTART" in variables(plan)

    plan = quickstart("train", "kubernetes.form=indexed-job")
    config, service, job = stage_objects(plan)
    assert (config["kind"], service["kind"], job["kind"]) == ("ConfigMap", "Service", "Job")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert variables(plan)["MLPIPE_RENDEZVOUS"] == f"{name}-0.{name}:29500"
    assert "MLPIPE_GANG_RESTART" not in variables(plan)
    for found in (jobset, job):
        spec = job_of(found)
        assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
        assert (spec["podReplacementPolicy"], pod_of(found)["restartPolicy"]) == ("Failed", "Never")
        assert not {"backoffLimitPerIndex", "successPolicy"} & spec.keys()


def test_a_stage_that_the_driver_does_has_no_objects() -> None:
    assert stage_objects(quickstart("promote")) == []


def test_a_command_is_a_plain_job() -> None:
    config, job = stage_objects(quickstart("corpus"))
    assert (config["kind"], job["kind"]) == ("ConfigMap", "Job")
    assert "completionMode" not in job["spec"]
    assert pod_of(job)["containers"][0]["args"][:3] == ["-P", "-m", "mlpipe.submit.pod"]
    assert "MLPIPE_RENDEZVOUS" not in variables(quickstart("corpus"))


def test_an_evaluation_on_one_node_is_a_plain_job_and_on_more_a_gang() -> None:
    assert stage_objects(quickstart("evaluate"))[-1]["kind"] == "JobSet"
    job = stage_objects(quickstart("evaluate", "evaluate.resources={nodes: 1}"))[-1]
    assert job["kind"] == "Job"
    assert pod_of(job)["containers"][0]["args"][:3] == ["-P", "-m", "mlpipe.train.launcher"]


def test_what_would_come_again_ends_a_jobset_before_a_disruption_restarts_it() -> None:
    jobset = stage_objects(quickstart("train", "train.timeout=3599.2 s", "kubernetes.max_gang_restarts=7"))[
        -1
    ]
    policy = jobset["spec"]["failurePolicy"]
    assert [(rule["name"], rule["action"]) for rule in policy["rules"]] == [
        ("overdue", "FailJobSet"),
        ("nonRetriable", "FailJobSet"),
        ("disruption", "RestartJobSetAndIgnoreMaxRestarts"),
    ]
    assert policy["maxRestarts"] == 7
    patterns = [f"exit code {code} " for code in (2, 3, 6)]
    assert policy["rules"][1]["onJobFailureMessagePatterns"] == patterns
    job = job_of(jobset)
    assert (job["backoffLimit"], job["activeDeadlineSeconds"]) == (0, 3600)
    codes, condition = job["podFailurePolicy"]["rules"]
    assert codes["onExitCodes"] == {"containerName": "worker", "operator": "In", "values": [2, 3, 5, 6]}
    assert (codes["action"], condition["action"]) == ("FailJob", "FailJob")


def test_what_would_come_again_ends_a_job_and_a_disruption_is_free() -> None:
    job = stage_objects(quickstart("train", "kubernetes.form=indexed-job"))[-1]["spec"]
    codes, saved, condition = job["podFailurePolicy"]["rules"]
    assert (codes["action"], codes["onExitCodes"]["values"]) == ("FailJob", [2, 3, 6])
    assert (saved["action"], saved["onExitCodes"]["values"]) == ("Ignore", [5])
    assert (condition["action"], condition["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert job["backoffLimit"] == 3 * 2
    assert "activeDeadlineSeconds" not in job


def test_cpu_pods_have_nothing_of_gpus() -> None:
    plan = quickstart()
    spec = pod_of(stage_objects(plan)[-1])
    assert not {"tolerations", "affinity"} & spec.keys()
    resources = spec["containers"][0]["resources"]
    assert resources == {
        "requests": {"cpu": "1", "memory": "4Gi", "ephemeral-storage": "2Gi"},
        "limits": {"memory": "4Gi", "ephemeral-storage": "64Gi"},
    }
    assert not [name for name in variables(plan) if name.startswith("TORCH_")]
    assert [one["whenUnsatisfiable"] for one in spec["topologySpreadConstraints"]] == ["ScheduleAnyway"]


def test_gpu_pods_have_all_of_it() -> None:
    plan = plan_of(pipeline_of("llm"), "train")
    spec = pod_of(stage_objects(plan)[-1])
    container = spec["containers"][0]
    limits = dict(container["resources"]["limits"])
    assert limits == container["resources"]["requests"] | {"ephemeral-storage": "64Gi"}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-H100-80GB-HBM3"]
    assert variables(plan)["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert [port["name"] for port in container["ports"]][:2] == ["metrics", "metrics-1"]
    assert spec["terminationGracePeriodSeconds"] == plan.launch.shutdown_seconds + 30 > 600
    own = plan_of(pipeline_of("llm", "kubernetes.gpu_product=X"), "train")
    assert '"X"' in json.dumps(pod_of(stage_objects(own)[-1])["affinity"])
    amd = stage_objects(plan_of(pipeline_of("llm", "kubernetes.gpu_resource=amd.com/gpu"), "train"))[-1]
    assert "affinity" not in pod_of(amd)
    assert pod_of(amd)["tolerations"][0]["key"] == "amd.com/gpu"


def test_groups_of_machines_are_numbered_one_after_the_other() -> None:
    groups = ", ".join(
        f"{{nodes: {nodes}, gpus_per_node: 8, gpu: {gpu}}}"
        for nodes, gpu in ((2, "H100-80GB"), (3, "A100-80GB"), (1, "H200"))
    )
    plan = plan_of(pipeline_of("llm", f"train.resources=[{groups}]", "train.strategy=fsdp"), "train")
    jobs = stage_objects(plan)[-1]["spec"]["replicatedJobs"]
    found = [
        (job["name"], job["template"]["spec"]["completions"], one["value"])
        for job in jobs
        for one in job["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
        if one["name"] == "MLPIPE_FIRST_NODE"
    ]
    assert found == [("worker", 2, "0"), ("g1", 3, "2"), ("g2", 1, "5")]


def test_a_command_on_two_nodes_is_a_gang_that_knows_where_to_meet() -> None:
    plan = plan_of(pipeline_of("llm", "corpus.resources={nodes: 2}"), "corpus")
    jobset = stage_objects(plan)[-1]
    assert (jobset["kind"], job_of(jobset)["parallelism"]) == ("JobSet", 2)
    name = jobset["metadata"]["name"]
    assert variables(plan)["MLPIPE_RENDEZVOUS"] == f"{name}-worker-0-0.{name}:29500"
    assert pod_of(jobset)["containers"][0]["args"][:3] == ["-P", "-m", "mlpipe.submit.pod"]


def test_nodes_that_did_not_pass_a_preflight_are_left_out() -> None:
    """A name each: the API server refuses a list of several in matchFields, and names of no node."""
    plan = plan_of(pipeline_of("llm"), "train")
    plan = replace(plan, launch=plan.launch._replace(avoid=("N1", "n1", "n2.zone-1", "n2..zone", "n.-1")))
    affinity = pod_of(stage_objects(plan)[-1])["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchFields"] == [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in ("n1", "n2.zone-1")
    ]
    assert term["matchExpressions"][0]["values"] == ["NVIDIA-H100-80GB-HBM3"]


def test_rdma_only_between_nodes() -> None:
    limits = {}
    for nodes in (1, 2):
        overrides = (
            "kubernetes.rdma={resource: rdma/hca}",
            f"train.resources.nodes={nodes}",
            "train.strategy=fsdp",
        )
        container = pod_of(stage_objects(plan_of(pipeline_of("llm", *overrides), "train"))[-1])["containers"][
            0
        ]
        limits[nodes] = container["resources"]["limits"].get("rdma/hca")
        assert container["securityContext"]["capabilities"].get("add", []) == (
            ["IPC_LOCK"] if nodes == 2 else []
        )
    assert limits == {1: None, 2: "1"}


def test_the_port_of_metrics_is_one_that_a_podmonitor_can_know() -> None:
    for asked, port in (("0", "9400"), ("9000", "9000")):
        assert variables(quickstart("train", f"train.metrics_port={asked}"))["MLPIPE_METRICS_PORT"] == port
    plan = quickstart("train", "train.metrics_port=off")
    assert not {"MLPIPE_METRICS_PORT", "MLPIPE_METRICS_ADDRESS"} & variables(plan).keys()
    assert "ports" not in pod_of(stage_objects(plan)[-1])["containers"][0]


def test_shared_memory_has_a_size() -> None:
    for override, size in (("kubernetes.max_gang_restarts=3", "1Gi"), ("kubernetes.shm=1536 MiB", "1536Mi")):
        volumes = {
            volume["name"]: volume
            for volume in pod_of(stage_objects(quickstart("train", override))[-1])["volumes"]
        }
        assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": size}


@pytest.mark.parametrize(
    ("asked", "request_", "limit"), [(None, "2Gi", "64Gi"), ("300 GiB", "300Gi", "300Gi")]
)
def test_the_disk_of_a_node_has_a_limit(asked: str | None, request_: str, limit: str) -> None:
    overrides = [f"train.resources.disk={asked}"] if asked else []
    spec = pod_of(stage_objects(quickstart("train", *overrides))[-1])
    resources = spec["containers"][0]["resources"]
    found = {kind: amounts["ephemeral-storage"] for kind, amounts in resources.items()}
    assert found == {"requests": request_, "limits": limit}
    sizes = {one["name"]: one["emptyDir"]["sizeLimit"] for one in spec["volumes"] if "emptyDir" in one}
    assert sizes == {"cache": limit, "tmp": limit, "scratch": limit, "shm": "1Gi"}
    plan = quickstart("train", *overrides)
    assert plan.cluster is not None
    (driver,) = driver_objects(
        "r", plan.store_url, plan.cluster, stage=None, spec_digest="0", seal="TEXT:SET"
    )
    spec = pod_of(driver)
    assert spec["containers"][0]["resources"]["limits"]["ephemeral-storage"] == "4Gi"
    assert {one["emptyDir"]["sizeLimit"] for one in spec["volumes"]} == {"4Gi"}


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(2**31, "2Gi"), (3 * 2**20, "3Mi"), (5 * 2**10, "5Ki"), (1000, "1000")]
)
def test_quantities(num_bytes: int, text: str) -> None:
    assert quantity(num_bytes) == text


@pytest.mark.parametrize(("asked", "cpu"), [("0.5", "500m"), ("1.5", "1500m"), ("2", "2")])
def test_parts_of_cores(asked: str, cpu: str) -> None:
    spec = pod_of(stage_objects(quickstart("train", f"train.resources.cpus={asked}"))[-1])
    assert spec["containers"][0]["resources"]["requests"]["cpu"] == cpu


@pytest.mark.parametrize("how", ["required", "preferred"])
def test_kueue_admits_what_is_created_suspended(how: str) -> None:
    queued = (
        "kubernetes.queue=a",
        "kubernetes.queue_priority=high",
        f"kubernetes.topology={{{how}: x/rack}}",
    )
    for stage in ("corpus", "train"):
        found = stage_objects(quickstart(stage, *queued))[-1]
        assert found["spec"]["suspend"] is True
        assert found["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "a"
        assert found["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "high"
        annotations = job_of(found)["template"]["metadata"]["annotations"]
        assert annotations[f"kueue.x-k8s.io/podset-{how}-topology"] == "x/rack"
    plan = quickstart("train", *queued)
    (driver,) = driver_objects(
        RUN_ID, plan.store_url, cluster_of(plan), stage=None, spec_digest="", seal="TEXT:SET"
    )
    assert "suspend" not in driver["spec"]
    assert "kueue.x-k8s.io/queue-name" not in driver["metadata"]["labels"]


def test_volcano_places_a_group_of_its_own() -> None:
    plan = quickstart("train", "kubernetes.volcano_queue=research")
    _, group, jobset = stage_objects(plan)
    assert (group["kind"], group["spec"]) == ("PodGroup", {"minMember": 2, "queue": "research"})
    assert pod_of(jobset)["schedulerName"] == "volcano"
    annotations = job_of(jobset)["template"]["metadata"]["annotations"]
    assert annotations["scheduling.k8s.io/group-name"] == group["metadata"]["name"]
    two = "[{nodes: 2, gpus_per_node: 8, gpu: H100-80GB}, {nodes: 2, gpus_per_node: 8, gpu: A100-80GB}]"
    of_groups = pipeline_of("llm", f"train.resources={two}", "kubernetes.volcano_queue=q")
    _, group, jobset = stage_objects(plan_of(of_groups, "train"))
    jobs = [one["template"]["spec"]["template"]["metadata"] for one in jobset["spec"]["replicatedJobs"]]
    names = [metadata["annotations"]["scheduling.k8s.io/group-name"] for metadata in jobs]
    assert names == [group["metadata"]["name"]] * 2


def test_the_driver_of_one_stage() -> None:
    patch = "{target: {kind: Pod, component: driver, stage: train}, strategic: {spec: {hostname: d}}}"
    plan = quickstart("train", f"kubernetes.patches=[{patch}]")
    cluster = cluster_of(plan)
    (whole,) = driver_objects(RUN_ID, plan.store_url, cluster, stage=None, spec_digest="d", seal="TEXT:SET")
    (alone,) = driver_objects(
        RUN_ID, plan.store_url, cluster, stage="train", spec_digest="d", seal="TEXT:SET"
    )
    assert whole["metadata"]["name"] != alone["metadata"]["name"]
    assert pod_of(alone)["containers"][0]["args"][-2:] == ["--stage", "train"]
    assert alone["metadata"]["labels"]["mlpipe.dev/stage"] == "train"
    assert [pod_of(found).get("hostname") for found in (whole, alone)] == [None, "d"]
    assert pod_of(whole)["restartPolicy"] == "Never"
    assert whole["spec"]["backoffLimit"] > 50
    assert "podFailurePolicy" not in whole["spec"]  # it would keep a lost node's driver from being replaced


def test_without_kueue_others_are_told_what_is_to_be_near() -> None:
    """By the words of docs/how-to/kubernetes.md: JobSet, Volcano and Slurm."""
    label = "alpha.jobset.sigs.k8s.io/exclusive-topology: example.com/rack"
    near = f"[{{target: {{kind: JobSet}}, strategic: {{metadata: {{annotations: {{{label}}}}}}}}}]"
    (gang,) = (
        one
        for one in stage_objects(quickstart("train", f"kubernetes.patches={near}"))
        if one["kind"] == "JobSet"
    )
    assert label.partition(": ")[0] in gang["metadata"]["annotations"]
    tiers = "{networkTopology: {mode: hard, highestTierAllowed: 1}}"
    near = f"[{{target: {{kind: PodGroup}}, strategic: {{spec: {tiers}}}}}]"
    plan = quickstart("train", "kubernetes.volcano_queue=ml", f"kubernetes.patches={near}")
    (group,) = (one for one in stage_objects(plan) if one["kind"] == "PodGroup")
    assert group["spec"]["networkTopology"] == {"mode": "hard", "highestTierAllowed": 1}
    spec = pipeline_of("quickstart", *QUICKSTART, 'slurm.options={switches: "1"}')
    assert "#SBATCH --switches=1\n" in script(plan_of(spec, "train"), slurm_job(spec, "train"), "slurm.out")


def test_a_patch_of_the_driver_is_the_drivers_alone() -> None:
    """And one of the workers theirs."""
    patches = [
        f"{{target: {{kind: Pod, component: {who}}}, strategic: {{spec: {{hostname: {who}}}}}}}"
        for who in ("driver", "worker")
    ]
    plan = quickstart("train", f"kubernetes.patches=[{', '.join(patches)}]")
    (driver,) = driver_objects(
        RUN_ID, plan.store_url, cluster_of(plan), stage=None, spec_digest="", seal="TEXT:SET"
    )
    assert pod_of(driver)["hostname"] == "driver"
    assert pod_of(stage_objects(plan)[-1])["hostname"] == "worker"
    two = "[{nodes: 2, gpus_per_node: 8, gpu: H100-80GB}, {nodes: 2, gpus_per_node: 8, gpu: A100-80GB}]"
    for more in (f"train.resources={two}", "train.resources.nodes=1..2"):
        of_stage = ", ".join(patches).replace("component: worker", "component: worker, stage: train")
        overrides = (f"kubernetes.patches=[{of_stage}]", "train.strategy=fsdp", more)
        of_llm = plan_of(pipeline_of("llm", *overrides), "train")
        *_, last = stage_objects(of_llm)
        jobs = [one["template"] for one in last["spec"].get("replicatedJobs", ())] or [last]
        assert [job["spec"]["template"]["spec"].get("hostname") for job in jobs] == ["worker"] * len(jobs)
    assert pod_of(replica_object(of_llm, 7))["hostname"] == "worker"


def test_a_patch_that_takes_annotations_away_leaves_the_digest() -> None:
    patch = "{target: {kind: ConfigMap}, strategic: {metadata: {annotations: null}}}"
    config, _ = stage_objects(quickstart("train", f"kubernetes.patches=[{patch}]"))
    assert config["metadata"]["annotations"] == {SPEC_DIGEST: object_digest(config)}


def test_where_replicas_meet_nothing_is_there_of_their_devices() -> None:
    overrides = (
        "train.resources.nodes=1..2",
        "train.strategy=fsdp",
        "network.profile=infiniband",
        "kubernetes.queue=q",
        "kubernetes.topology={preferred: block, inner: rack}",
    )
    _, coordinator, *replicas = stage_objects(plan_of(pipeline_of("llm", *overrides), "train"))
    (container,) = pod_of(coordinator)["containers"]
    assert container["resources"]["requests"].keys() == {"cpu", "memory", "ephemeral-storage"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "affinity" not in pod_of(coordinator)
    for replica in replicas:
        annotations = job_of(replica)["template"]["metadata"]["annotations"]
        assert annotations["kueue.x-k8s.io/podset-preferred-topology"] == "block"
        assert "kueue.x-k8s.io/podset-slice-size" not in annotations


def test_one_replica_is_the_very_object_that_all_of_them_are() -> None:
    plan = quickstart("train", "train.resources.nodes=2..3", "kubernetes.queue=q", "kubernetes.namespace=n")
    config, _, *replicas = stage_objects(plan)
    assert [replica_object(plan, number) for number in range(3)] == replicas
    later = replica_object(plan, 7)
    assert later["metadata"]["name"].endswith("-7")
    assert later["metadata"]["labels"]["mlpipe.dev/replica"] == "7"
    plans = [one for one in pod_of(later)["volumes"] if one["name"] == "plan"]
    assert plans == [{"name": "plan", "configMap": {"name": config["metadata"]["name"]}}]


def test_pods_without_gpus_may_stand_where_the_node_selector_sends_them() -> None:
    leaves = "kubernetes.tolerations=[{key: example.com/away, effect: NoExecute, toleration_seconds: 9}]"
    plan = plan_of(pipeline_of("llm", "kubernetes.node_selector={pool: gpu}", leaves), "corpus")
    first, second = pod_of(stage_objects(plan)[-1])["tolerations"]
    assert first["key"] == "nvidia.com/gpu"
    assert (second["effect"], second["tolerationSeconds"]) == ("NoExecute", 9)


def test_certificates_and_proxy_reach_all_pods() -> None:
    plan = quickstart(
        "train",
        "kubernetes.ca_bundle={config_map: ca}",
        "kubernetes.proxy={https: 'http://p:1', no_proxy: [a.example]}",
    )
    found = variables(plan)
    assert found["AWS_CA_BUNDLE"] == found["SSL_CERT_FILE"] == "/mlpipe/ca/ca.crt"
    assert found["HTTPS_PROXY"] == found["https_proxy"] == "http://p:1"
    assert found["NO_PROXY"] == "localhost,127.0.0.1,.svc,.cluster.local,minio.storage,a.example"
    assert "HTTP_PROXY" not in found
    both = variables(quickstart("train", "kubernetes.proxy={http: 'http://p:1', https: 'http://p:2'}"))
    assert [both[name] for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY")] == [
        "http://p:1", "http://p:1", "http://p:2"
    ]  # fmt: skip
    far = "kubernetes.store.endpoint=https://s3.example.com"  # not a Service's short name: by the proxy
    proxied = variables(quickstart("train", far, "kubernetes.proxy={https: 'http://p:1'}"))
    assert proxied["NO_PROXY"] == "localhost,127.0.0.1,.svc,.cluster.local"
    (driver,) = driver_objects(
        RUN_ID, plan.store_url, cluster_of(plan), stage=None, spec_digest="", seal="TEXT:SET"
    )
    env = {one["name"]: one.get("value") for one in pod_of(driver)["containers"][0]["env"]}
    assert env["no_proxy"] == found["no_proxy"] + ",$(KUBERNETES_SERVICE_HOST)"


STORE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


def store_pods(*overrides: str) -> dict[str, tuple[Json, dict[str, Any]]]:
    """Spec and variables of the pods of the quickstart's driver and training."""
    train = quickstart("train", *overrides)
    objects = {"train": stage_objects(train)[-1]}
    (objects["driver"],) = driver_objects(
        RUN_ID, train.store_url, cluster_of(train), stage=None, spec_digest="", seal="TEXT:SET"
    )
    specs = {name: pod_of(found) for name, found in objects.items()}
    return {
        name: (
            spec,
            {one["name"]: one.get("value", one.get("valueFrom")) for one in spec["containers"][0]["env"]},
        )
        for name, spec in specs.items()
    }


def test_the_driver_may_have_keys_of_its_own() -> None:
    for name, (spec, env) in store_pods("kubernetes.store.driver_secret=driver").items():
        secret = "mlpipe-store" if name == "train" else "driver"
        assert {env[key]["secretKeyRef"]["name"] for key in STORE_KEYS} == {secret}
        assert spec["serviceAccountName"] == ("mlpipe-driver" if name == "driver" else "mlpipe-worker")


def test_with_web_identity_no_pod_has_keys_and_each_shows_a_token_for_the_store_alone() -> None:
    identity = "{role: 'arn:aws:iam::1:role/w', driver_role: 'arn:aws:iam::1:role/d', audience: a, endpoint: 'http://s'}"
    for name, (spec, env) in store_pods(f"kubernetes.store.web_identity={identity}").items():
        assert not env.keys() & set(STORE_KEYS)
        assert env["AWS_ROLE_ARN"] == f"arn:aws:iam::1:role/{'w' if name == 'train' else 'd'}"
        assert env["AWS_ENDPOINT_URL_STS"] == "http://s"
        assert env["AWS_ENDPOINT_URL_S3"] == "http://minio.storage:9000"
        assert env["AWS_WEB_IDENTITY_TOKEN_FILE"] == "/mlpipe/identity/token"
        (volume,) = [found for found in spec["volumes"] if found["name"] == "identity"]
        token = {"audience": "a", "expirationSeconds": 3600, "path": "token"}
        assert volume["projected"] == {"sources": [{"serviceAccountToken": token}]}
        assert {"name": "identity", "mountPath": "/mlpipe/identity", "readOnly": True} in spec["containers"][
            0
        ]["volumeMounts"]
        assert spec["automountServiceAccountToken"] is (name == "driver")
        account = "mlpipe-worker" if name == "train" else "mlpipe-driver"
        assert spec["serviceAccountName"] == account
    for _, env in store_pods("kubernetes.store.web_identity={}").values():
        assert not env.keys() & {"AWS_ROLE_ARN", "AWS_ENDPOINT_URL_STS", *STORE_KEYS}


def test_what_the_user_sets_cannot_overrule_what_the_pod_relies_on() -> None:
    found = variables(
        quickstart("train", "train.env={HOME: /root, AWS_REGION: x, MY: '1'}", "kubernetes.store.region=y")
    )
    assert (found["HOME"], found["AWS_REGION"], found["MY"]) == ("/tmp", "y", "1")


def test_no_image_is_refused() -> None:
    plan = plan_of(pipeline_of("quickstart", "store=s3://ml-runs/x"), "train")
    with pytest.raises(RenderError, match="'quickstart' says nothing of a cluster") as caught:
        stage_objects(plan)
    assert (caught.value.where, "add 'image: " in str(caught.value.hint)) == ("train", True)
    plan = plan_of(pipeline_of("quickstart", "store=s3://ml-runs/x", "kubernetes.queue=a"), "train")
    with pytest.raises(RenderError, match="names no container image") as caught:
        stage_objects(plan)
    assert "add 'image: " in str(caught.value.hint)


@pytest.mark.parametrize(
    ("store", "volume", "words"),
    [
        ("/data/runs", "{claim: c, path: /data}", None),
        ("file:///data/my%20runs", "{claim: c, path: /data}", None),
        ("/data", "{claim: c, path: /data}", None),
        ("/database", "{claim: c, path: /data}", "a folder that the pods do not share"),
        ("/data/runs", "{claim: c, path: /data, read_only: true}", "a volume that is read-only"),
        ("/data/../home", "{claim: c, path: /data}", "a folder that the pods do not share"),
    ],
)
def test_a_folder_store_needs_a_volume(store: str, volume: str, words: str | None) -> None:
    plan = quickstart("train", f"store={store}", f"kubernetes.volumes=[{volume}]")
    if words is not None:
        with pytest.raises(RenderError, match=words) as caught:
            stage_objects(plan)
        remedy = (caught.value.where, "mount a claim there" in str(caught.value.hint))
        assert remedy in (("c", False), (None, True))
        with pytest.raises(RenderError, match=words):
            driver_objects(
                RUN_ID, plan.store_url, cluster_of(plan), stage=None, spec_digest="", seal="TEXT:SET"
            )
        return
    assert "AWS_ACCESS_KEY_ID" not in variables(plan)
    assert pod_of(stage_objects(plan)[-1])["containers"][0]["volumeMounts"]


def test_one_claim_in_two_places_is_one_volume() -> None:
    volumes = (
        "[{claim: c, path: /a, sub_path: x}, {claim: c, path: /b, read_only: true}, {claim: d, path: /c}]"
    )
    spec = pod_of(stage_objects(quickstart("train", f"kubernetes.volumes={volumes}"))[-1])
    claims = [one for one in spec["volumes"] if "persistentVolumeClaim" in one]
    assert [one["persistentVolumeClaim"]["claimName"] for one in claims] == ["c", "d"]
    mounts = [one for one in spec["containers"][0]["volumeMounts"] if one["name"].startswith("claim")]
    assert mounts == [
        {"name": "claim-0", "mountPath": "/a", "subPath": "x"},
        {"name": "claim-0", "mountPath": "/b", "readOnly": True},
        {"name": "claim-1", "mountPath": "/c"},
    ]
    spec = pod_of(stage_objects(quickstart("train", "kubernetes.cache={claim: c, sub_path: s}"))[-1])
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}} in spec["volumes"]
    mount = {"name": "cache", "mountPath": "/mlpipe/cache", "subPath": "s"}
    assert mount in spec["containers"][0]["volumeMounts"]


def test_a_plan_that_no_configmap_takes_is_refused() -> None:
    plan = quickstart()
    large = replace(plan, work=plan.work.training._replace(reason="x" * 2**20))
    with pytest.raises(RenderError, match=r"plan\.json has \d+ bytes, a ConfigMap takes 1048576") as caught:
        stage_objects(large)
    assert (caught.value.where, "from a file" in str(caught.value.hint)) == ("train", True)


UNSORTED = (
    'train.env={Z: "1", A: "2", M: "3"}',
    "kubernetes.node_selector={z: a, a: z}",
    "kubernetes.secret_env={Z9: {secret: s, key: k}, A9: {secret: s, key: k}}",
    "kubernetes.patches=[{target: {kind: Pod}, strategic: {spec: {z: 1, a: 2}}}]",
)


@pytest.mark.parametrize("form", ["jobset", "indexed-job"])
def test_a_plan_that_was_read_back_gives_the_same_objects(form: str) -> None:
    """A driver that takes over reads plan.json, and adopts what the one before it made of the plan."""
    pipeline = pipeline_of("quickstart", *QUICKSTART, f"kubernetes.form={form}", *UNSORTED)
    for stage in pipeline.stages:
        plan = plan_of(pipeline, stage.name)
        again = stage_objects(Plan.from_json(plan.to_json()))
        assert [found["metadata"] for found in again] == [found["metadata"] for found in stage_objects(plan)]


def test_the_driver_has_the_secrets_that_are_meant_for_it() -> None:
    plan = quickstart(
        "train",
        "kubernetes.driver_secret_env={MLFLOW_TRACKING_TOKEN: {secret: mlflow, key: token}}",
        "kubernetes.secret_env={HF_TOKEN: {secret: hub, key: token}}",
    )
    (driver,) = driver_objects(
        RUN_ID, plan.store_url, cluster_of(plan), stage=None, spec_digest="", seal="TEXT:SET"
    )
    (worker,) = (pod_of(stage_objects(plan)[-1]),)
    found = [
        {
            one["name"]: one["valueFrom"]["secretKeyRef"]["name"]
            for one in env
            if "secretKeyRef" in one.get("valueFrom", {})
        }
        for env in (pod["containers"][0]["env"] for pod in (pod_of(driver), worker))
    ]
    assert found[0].get("MLFLOW_TRACKING_TOKEN") == "mlflow"
    assert "HF_TOKEN" not in found[0]
    assert "MLFLOW_TRACKING_TOKEN" not in found[1]
    assert found[1]["HF_TOKEN"] == "hub"


@pytest.mark.parametrize(
    ("overrides", "size"),
    [
        (("train.resources.nodes=4", "train.mesh={dp_replicate: 4, dp_shard: 8}"), "1"),
        (("train.resources.nodes=4", "train.strategy=fsdp"), "4"),
        (("train.resources.nodes=4", "train.mesh={dp_replicate: 2, dp_shard: 16}"), "2"),
        (("train.resources.nodes=4", "train.mesh={dp_replicate: 8, dp_shard: 4}"), None),
        (("train.resources.nodes=1", "train.strategy=fsdp"), None),
        (
            (
                "train.resources=[{nodes: 2, gpus_per_node: 8, gpu: H100-80GB}, {nodes: 2, gpus_per_node: 8, "
                "gpu: A100-80GB}]",
            ),
            None,
        ),
    ],
)
def test_nodes_whose_ranks_share_weights_stand_in_one_rack(
    overrides: tuple[str, ...], size: str | None
) -> None:
    """Slices of pods by index; the mesh numbers such ranks next to each other."""
    inner = ("kubernetes.queue=q", "kubernetes.topology={preferred: block, inner: rack}")
    plan = plan_of(pipeline_of("llm", *inner, *overrides), "train")
    annotations = job_of(stage_objects(plan)[-1])["template"]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-preferred-topology"] == "block"
    assert annotations.get("kueue.x-k8s.io/podset-slice-size") == size
    assert annotations.get("kueue.x-k8s.io/podset-slice-required-topology") == ("rack" if size else None)
    if size is not None:
        training, each = plan.work.training, plan.launch.nproc_per_node
        groups: dict[tuple[int, ...], set[int]] = {}
        for rank in range(training.mesh.world_size):
            at = training.mesh.coordinates(rank)
            groups.setdefault((at["pp"], at["dp_replicate"]), set()).add(rank // each // int(size))
        assert [len(slices) for slices in groups.values()] == [1] * len(groups)


@pytest.mark.parametrize(
    ("nodes", "size"), [(4, "4"), (3, "2")], ids=["a rack holds a pipeline", "a rack is smaller"]
)
def test_a_pipeline_stands_in_a_rack_that_holds_it(nodes: int, size: str) -> None:
    overrides = (
        "kubernetes.queue=q",
        "kubernetes.topology={preferred: block, inner: rack}",
        f"network={{profile: infiniband, racks: {{nodes: {nodes}, gb_per_second: 12.5}}}}",
        "train.resources.nodes=8",
        "train.mesh={pp: 2, dp_replicate: 2, dp_shard: 16}",
    )
    plan = plan_of(pipeline_of("llm", *overrides), "train")
    annotations = job_of(stage_objects(plan)[-1])["template"]["metadata"]["annotations"]
    assert annotations["kueue.x-k8s.io/podset-slice-size"] == size


SPARES = ("train.resources.preflight=auto", "train.resources.spares=2")


@pytest.mark.parametrize(
    ("overrides", "kind", "where"),
    [
        ((), "JobSet", ("replicatedJobs", 0, "template", "spec", "completions")),
        ((), "JobSet", ("replicatedJobs", 0, "template", "spec", "parallelism")),
        (("kubernetes.volcano_queue=q",), "PodGroup", ("minMember",)),
        (
            ("kubernetes.form=trainjob", "kubernetes.trainjob={runtime: mlpipe}"),
            "TrainJob",
            ("trainer", "numNodes"),
        ),
    ],
)
def test_a_gang_with_spares_has_a_pod_for_each(
    overrides: tuple[str, ...], kind: str, where: tuple[str | int, ...]
) -> None:
    found = stage_objects(quickstart("train", *SPARES, *overrides))
    value: Any = next(one for one in found if one["kind"] == kind)["spec"]
    for key in where:
        value = value[key]
    assert value == 4
    gang = found[-1]["spec"]
    env = gang["trainer"]["env"] if kind == "TrainJob" else pod_of(found[-1])["containers"][0]["env"]
    assert {"name": "MLPIPE_NUM_MACHINES", "value": "4"} in env


def test_an_image_is_fetched_with_the_rights_of_no_device_and_as_patches_leave_it() -> None:
    overrides = (
        "kubernetes.prepull=true",
        "network.profile=infiniband",
        "kubernetes.patches=[{target: {kind: Pod, stage: train}, strategic: {spec: {containers: "
        "[{name: worker, image: other.example.com/x:1}]}}}]",
    )
    pipeline = pipeline_of("llm", "kubernetes.namespace=ml", *overrides)
    plans = [plan_of(pipeline, stage.name) for stage in pipeline.stages]
    jobs = prepull_objects(plans, waiting(pipeline, None), pipeline.digest)
    assert [pod_of(job)["containers"][0]["image"] for job in jobs] == [
        "other.example.com/x:1",
        pipeline.image,
    ]
    train = jobs[0]
    assert train["spec"]["parallelism"] == plans[1].launch.num_nodes
    gang, pod = pod_of(stage_objects(plans[1])[-1]), pod_of(train)
    assert pod["affinity"] == gang["affinity"]
    assert pod["tolerations"] == gang["tolerations"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"].keys() == {"memory", "ephemeral-storage"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert pod["automountServiceAccountToken"] is False
    assert not {"volumes", "priorityClassName"} & pod.keys()
    labels = train["metadata"]["labels"]
    assert "mlpipe.dev/stage" not in labels  # no gang takes its pods for its own
    assert labels["mlpipe.dev/run"] == RUN_ID  # cancel finds it
    assert train["metadata"]["namespace"] == "ml"
    assert prepull_objects(plans, waiting(pipeline, "train"), pipeline.digest) == []
    of_one = "evaluate.resources={nodes: 1, gpus_per_node: 8, gpu: H100-80GB}"
    same = pipeline_of("llm", "kubernetes.prepull=true", of_one)
    (job,) = prepull_objects([plan_of(same, one.name) for one in same.stages], waiting(same, None), "d")
    assert job["spec"]["parallelism"] == train["spec"]["parallelism"]  # of the same nodes those of the larger
    elastic = quickstart("train", "kubernetes.prepull=true", "train.resources.nodes=1..3")
    (job,) = prepull_objects([elastic], ["train"], "d")
    assert job["spec"]["parallelism"] == 3  # as many as there may be, and none for the coordinator
    without = pipeline_of("llm")
    plans = [plan_of(without, stage.name) for stage in without.stages]
    assert prepull_objects(plans, waiting(without, None), without.digest) == []
