"""A plan for a cluster depends on the pipeline alone, not on the machine that makes it."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kit.rendered import PIPELINES, QUICKSTART, pipeline_of, plan_of

from mlpipe._core.errors import PlanError, SubmitError
from mlpipe._core.gpus import gpu_classes
from mlpipe._core.units import parse_bytes
from mlpipe.plan import hardware
from mlpipe.plan.cluster import ClusterPlan, Topology
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.plan import Plan
from mlpipe.plan.pods import MIB, host_bytes, pod_resources
from mlpipe.plan.slurm import slurm_job
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.render.lint import lint
from mlpipe.render.pod import CACHE, SCRATCH
from mlpipe.spec.load import load_pipeline
from mlpipe.submit import process_executor

pytestmark = pytest.mark.unit


def cluster_of(plan: Plan) -> ClusterPlan:
    assert plan.cluster is not None
    return plan.cluster


def test_the_machine_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = pipeline_of("quickstart", *QUICKSTART)
    before = [plan_of(pipeline, stage.name).to_json() for stage in pipeline.stages]
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(77)), raising=False)
    monkeypatch.setattr(hardware, "machine_memory_bytes", lambda: 1)
    assert before == [plan_of(pipeline, stage.name).to_json() for stage in pipeline.stages]


@pytest.mark.parametrize(
    ("overrides", "stage", "cpus", "memory"),
    [
        (QUICKSTART, "train", 1.0, "4 GiB"),
        ((*QUICKSTART, "train.resources.workers_per_node=4"), "train", 4.0, "16 GiB"),
        ((*QUICKSTART, "train.resources.workers_per_node=4"), "evaluate", 4.0, "16 GiB"),
        ((*QUICKSTART, "train.resources.cpus=0.5", "train.resources.memory=1 GiB"), "train", 0.5, "1 GiB"),
        (QUICKSTART, "corpus", 1.0, "2 GiB"),
    ],
)
def test_what_a_pod_gets(overrides: tuple[str, ...], stage: str, cpus: float, memory: str) -> None:
    cluster = cluster_of(plan_of(pipeline_of("quickstart", *overrides), stage))
    assert (cluster.cpus, cluster.memory_bytes) == (cpus, parse_bytes(memory))
    assert cluster.shm_bytes == parse_bytes(memory) // 4
    assert cluster.shm_bytes % MIB == 0


def test_copies_of_what_lies_in_buckets_have_room_on_the_pods_disk() -> None:
    bucket = ("train.train.data={tokens: 's3://bucket/a', cache: 30 GiB, batch_size: 8}",)
    sizes = [
        cluster_of(plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), stage)).disk_bytes
        for overrides in ((), (*bucket, "train.train.model.vocab_size=4096"))
        for stage in ("train", "evaluate", "corpus")
    ]
    assert sizes == [None, None, None, 38 * 2**30, 38 * 2**30, None]


def test_shared_memory_of_a_small_pod_is_a_part_of_its_memory() -> None:
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART, "corpus.resources={memory: 64 MiB}"), "corpus")
    assert cluster_of(plan).shm_bytes == 16 * MIB
    assert not [line for line in lint(plan) if "/dev/shm" in line]


def test_what_a_pod_with_gpus_gets() -> None:
    resources = pipeline_of("llm").stage("train").resources
    assert resources is not None
    found = pod_resources(resources.model_copy(update={"cpus": None, "memory": None}))
    assert (found.cpus, parse_bytes(found.memory or "")) == (32.0, 8 * 32 * 2**30)
    assert pod_resources(resources) == resources


def test_every_gpu_of_the_planner_is_one_that_clusters_know() -> None:
    assert GPUS.keys() <= gpu_classes().keys()


def test_a_pipeline_without_a_cluster() -> None:
    pipeline = load_pipeline(PIPELINES / "quickstart.yaml")
    assert {plan_of(pipeline, stage.name).cluster for stage in pipeline.stages} == {None}


def test_the_plan_reads_back_whole() -> None:
    overrides = (
        "kubernetes.queue=a",
        "kubernetes.topology={preferred: b}",
        "kubernetes.tolerations=[{}]",
        "kubernetes.env_from=[{secret: a}, {config_map: b}]",
        "kubernetes.secret_env={A: {secret: b, key: c}}",
        "kubernetes.proxy={http: 'http://a', no_proxy: [b]}",
        "kubernetes.rdma={resource: a/b}",
        "kubernetes.patches=[{target: {kind: Pod}, json: [{op: add, path: /a, value: null}]}]",
    )
    plan = plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), "train")
    assert Plan.from_json(plan.to_json()) == plan
    assert cluster_of(plan).topology == Topology("b", required=False)
    assert [found.kind for found in cluster_of(plan).env_from] == ["secret", "config_map"]
    assert cluster_of(plan).ttl_seconds == 7 * 86_400


def folders(stage: str, *overrides: str) -> dict[str, dict[str, Any]]:
    """By the folder that a pod sees, the volume behind it, with the path there."""
    (*_, body) = stage_objects(plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), stage))
    spec = body["spec"]["replicatedJobs"][0]["template"]["spec"] if body["kind"] == "JobSet" else body["spec"]
    pod = spec["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    return {
        mount["mountPath"]: {**volumes[mount["name"]], "at": mount.get("subPath")}
        for mount in container["volumeMounts"]
    }


def test_scratch_is_a_volume_of_the_pods_own_where_the_stage_says_so() -> None:
    scratch = "kubernetes.gpu_pods={scratch: {size: 1 GiB}}"
    own = "kubernetes.stages={train: {scratch: {size: 500 GiB, storage_class: local-nvme}}}"
    found = folders("train", scratch, own)
    claim = found[SCRATCH]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "local-nvme"
    assert claim["resources"] == {"requests": {"storage": "500Gi"}}
    assert (found[SCRATCH]["name"], found[SCRATCH]["at"], found[CACHE]["at"]) == (
        found[CACHE]["name"],
        "scratch",
        "cache",
    )
    for stage, other in (("corpus", own), ("train", "kubernetes.max_gang_restarts=3")):
        assert "emptyDir" in folders(stage, other)[SCRATCH]
        assert "emptyDir" in folders(stage, other)[CACHE]


def test_a_warm_cache_outlives_the_pods_of_stages_and_is_none_of_the_driver() -> None:
    overrides = ("kubernetes.cache={claim: warm, sub_path: team}", "kubernetes.scratch={size: 1 GiB}")
    found = folders("train", *overrides)
    assert found[CACHE]["persistentVolumeClaim"] == {"claimName": "warm"}
    assert found[CACHE]["at"] == "team"
    assert "ephemeral" in found[SCRATCH]
    plan = plan_of(
        pipeline_of("quickstart", *QUICKSTART, *overrides, "train.env.TRITON_CACHE_DIR=/tmp/x"), "train"
    )
    (*_, body) = stage_objects(plan)
    text = str(body)
    assert "'name': 'TORCHINDUCTOR_CACHE_DIR', 'value': '/mlpipe/cache/inductor'" in text
    assert "'name': 'XDG_CACHE_HOME', 'value': '/mlpipe/cache/tools'" in text
    assert "'name': 'TRITON_CACHE_DIR', 'value': '/tmp/x'" in text  # the stage's word goes before
    (*_, body) = stage_objects(plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), "corpus"))
    assert "'name': 'TRITON_CACHE_DIR', 'value': '/mlpipe/cache/triton'" in str(body)
    driver = driver_objects("r", plan.store_url, cluster_of(plan), stage=None, spec_digest="d", seal="s")
    assert "warm" not in str(driver)
    assert "ephemeral'" not in str(driver)


def test_copies_of_data_have_room_in_a_volume() -> None:
    bucket = "train.train.data={tokens: 's3://bucket/a', cache: 30 GiB, batch_size: 8}"

    def disk(*overrides: str) -> int | None:
        more = (bucket, "train.train.model.vocab_size=4096", *overrides)
        return cluster_of(plan_of(pipeline_of("quickstart", *QUICKSTART, *more), "train")).disk_bytes

    assert disk("kubernetes.scratch={size: 30 GiB}") is disk("kubernetes.cache={claim: warm}") is None
    with pytest.raises(
        PlanError, match=r"scratch of 20\.0 GiB is too small: copies of data take up to 30\.0"
    ):
        disk("kubernetes.scratch={size: 20 GiB}")


def test_what_waits_on_the_host_has_room_in_pods_and_jobs_or_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = ("train.resources={nodes: 1, gpus_per_node: 1, gpu: H100-80GB}", "train.train.strategy=single")
    away = (*one, "train.optimizer={name: adamw, lr: 1e-4}", "train.compile=off", "train.offload=optimizer")
    pipeline = pipeline_of("llm", *away)
    plan = plan_of(pipeline, "train")
    each = plan.work.training.host_memory_bytes
    assert each is not None
    needed = -(-(each + 4 * 2**30) // MIB) * MIB
    assert needed > 32 * 2**30  # of a pod with one GPU
    assert cluster_of(plan).memory_bytes == needed
    assert Plan.from_json(plan.to_json()) == plan
    job = slurm_job(pipeline_of("llm", *away, "slurm={}"), "train", host_bytes(plan.work, plan.launch))
    assert job.memory_mib * MIB == needed
    assert cluster_of(plan_of(pipeline_of("llm", *one), "train")).memory_bytes == 32 * 2**30
    with pytest.raises(PlanError, match="memory of 32 GiB a node is too little: what waits on the host"):
        plan_of(pipeline_of("llm", *away, "train.resources.memory=32 GiB"), "train")
    monkeypatch.setattr(process_executor, "machine_memory_bytes", lambda: needed - MIB)
    with pytest.raises(SubmitError, match="what waits on the host"):
        process_executor.check_fits(plan, num_gpus=1)
    monkeypatch.setattr(process_executor, "machine_memory_bytes", lambda: needed)
    process_executor.check_fits(plan, num_gpus=1)
