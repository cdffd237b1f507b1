"""What the lint says, in words, of plans that would go wrong on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from kit.rendered import QUICKSTART, RUN_ID, pipeline_of, plan_of

from mlpipe.plan.grace import CEILING_SECONDS, shutdown_seconds
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.render.lint import lint, lint_patches

pytestmark = pytest.mark.unit


def quickstart(*overrides: str) -> Plan:
    return plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), "train")


def llm(*overrides: str) -> Plan:
    return plan_of(pipeline_of("llm", *overrides), "train")


def train_of(plan: Plan) -> TrainPlan:
    return plan.work.training


def test_nothing_to_say() -> None:
    assert lint(quickstart()) == []
    assert lint(plan_of(pipeline_of("quickstart"), "train")) == []
    assert lint(quickstart("kubernetes.shm=2 GiB")) == []  # half of the memory
    (tag,) = lint(llm("train.resources.gpus_per_node=16"))
    assert "is a tag" in tag


def test_of_a_stage_that_the_driver_runs_it_is_what_the_driver_needs() -> None:
    asked = ["image=mlpipe:1", "kubernetes.store.endpoint=http://127.0.0.1:9000", "kubernetes.shm=4 GiB"]
    pipeline = pipeline_of("quickstart", *QUICKSTART, *asked)
    plan = plan_of(pipeline, "promote")
    assert [line.partition(" ")[0] for line in lint(plan)] == ["warning:", "error:"]
    both = lint(plan_of(pipeline, "train"))
    assert both[:2] == lint(plan)
    assert len(both) == 3


@pytest.mark.parametrize(
    ("plan", "overrides", "words"),
    [
        (llm, [], "warning: image registry.example.com/team/mlpipe:1.0 is a tag"),
        (
            quickstart,
            ["kubernetes.shm=4 GiB"],
            "error: stage train: /dev/shm of 4.0 GiB counts as memory",
        ),
        (
            quickstart,
            ["kubernetes.shm=3 GiB"],
            "warning: stage train: /dev/shm of 3.0 GiB may take more than half",
        ),
        (llm, ["kubernetes.rdma={resource: rdma/hca}"], "pod-security.kubernetes.io/enforce=privileged"),
        (
            llm,
            ["kubernetes.rdma={resource: rdma/hca}", "train.resources.nodes=1"],
            "warning: stage train: kubernetes.rdma is of no use on one node",
        ),
        *(
            (
                quickstart,
                [f"kubernetes.store.endpoint=http://{host}:9000"],
                f"error: kubernetes.store.endpoint http://{host}:9000 is the pod itself",
            )
            for host in ("127.0.0.1", "localhost")
        ),
        (
            quickstart,
            ["train.init_from={path: file:///data/w.safetensors}", "kubernetes.shm=3 GiB"],
            "may take more than half",  # both are told
        ),
        (llm, ["train.resources.gpus_per_node=32"], "error: stage train: no node has 32 GPUs"),
    ],
)
def test_findings(plan: Callable[..., Plan], overrides: list[str], words: str) -> None:
    assert [line for line in lint(plan(*overrides)) if words in line]


def test_a_name_that_is_too_long_is_found() -> None:
    (found,) = lint(dataclasses.replace(quickstart(), run_id="r" * 40))
    assert found.startswith("warning: stage train: " + "r" * 40 + "-train-a1 has 49 characters")


@pytest.mark.parametrize(
    ("start", "is_seen"),
    [
        ("{path: ./w.safetensors}", False),
        ("{path: /data/w.safetensors}", False),
        ("{run: r, store: /data/runs}", False),
        ("{path: /shared/llama/w.safetensors}", True),
        ("{path: /shared/../data/w.safetensors}", False),
        ("{path: 'file:///data/w.safetensors'}", False),
        ("{path: 'file:///shared/w.safetensors'}", True),
        ("{path: 's3://bucket/w.safetensors'}", True),
        ("{path: '{{stages.corpus.output}}/w.safetensors'}", True),
        ("{run: r}", True),
        ("{model: m@good}", True),
    ],
)
def test_all_pods_must_see_the_weights_that_they_start_from(start: str, is_seen: bool) -> None:
    volumes = "kubernetes.volumes=[{claim: weights, path: /shared, read_only: true}]"
    found = [line for line in lint(quickstart(f"train.init_from={start}", volumes)) if "init_from" in line]
    assert found == [] if is_seen else found[0].startswith("error: stage train: init_from ")


def test_the_grace_period_grows_with_the_checkpoint() -> None:
    """8.03e9 parameters, 12 bytes each, at 100 MB/s: 964 s, after a step of up to 120 s."""
    assert quickstart().launch.shutdown_seconds == 600
    plan = llm("train.strategy=hsdp")  # a whole one on each node
    assert plan.launch.shutdown_seconds == 1084
    assert not [line for line in lint(plan) if "checkpoint" in line]
    huge = llm(
        "train.model={preset: llama-70b, seq_len: 8192}", "train.resources.nodes=16", "train.strategy=fsdp"
    )
    assert shutdown_seconds(train_of(huge), 8) == 650  # 847 GB over 16 nodes
    alone = train_of(huge)._replace(mesh=dataclasses.replace(train_of(huge).mesh, dp_shard=8))
    assert shutdown_seconds(alone, 8) == CEILING_SECONDS
    launch = huge.launch._replace(shutdown_seconds=CEILING_SECONDS)
    found = lint(dataclasses.replace(huge, work=alone, launch=launch))
    (line,) = [line for line in found if "checkpoint" in line]
    assert "takes up to 2h21m (100 MB/s a node), but 1h00m after SIGTERM the pod is killed" in line


def test_a_patch_that_changes_nothing_is_found() -> None:
    patches = (
        "kubernetes.patches=[{target: {kind: Pod}, strategic: {}}, {target: {kind: Service}, strategic: {}}, "
        "{target: {kind: JobSet, stage: corpus}, strategic: {}}, "
        "{target: {kind: Pod, stage: train, component: worker}, strategic: {}}, "
        "{target: {kind: Job, component: driver}, json: []}]"
    )
    pipeline = pipeline_of("quickstart", *QUICKSTART, patches)
    plans = [plan_of(pipeline, stage.name) for stage in pipeline.stages]
    cluster = plans[0].cluster
    assert cluster is not None
    driver = driver_objects(RUN_ID, pipeline.store, cluster, stage=None, spec_digest="", seal="TEXT:SET")
    assert lint_patches(plans, [*map(stage_objects, plans), driver]) == [
        "error: kubernetes.patches[1] fits no Service: there is none in what is rendered",
        "error: kubernetes.patches[2] fits no JobSet of stage corpus: there is none in what is rendered",
    ]
