"""A plan for a cluster depends on the pipeline alone, not on the machine that makes it."""

from __future__ import annotations

import os

import pytest
from kit.rendered import PIPELINES, QUICKSTART, pipeline_of, plan_of

from mlpipe._core.gpus import gpu_classes
from mlpipe._core.units import parse_bytes
from mlpipe.plan import hardware
from mlpipe.plan.cluster import ClusterPlan, Topology
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.plan import Plan
from mlpipe.plan.pods import MIB, pod_resources
from mlpipe.render.lint import lint
from mlpipe.spec.load import load_pipeline

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
