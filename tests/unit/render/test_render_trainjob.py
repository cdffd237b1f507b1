"""A TrainJob and the shipped runtime together say what a JobSet says; what they could not say is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe._core.errors import RenderError
from mlpipe.plan.grace import CEILING_SECONDS
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.lint import lint_patches
from mlpipe.render.patches import _merge
from mlpipe.render.pod import GRACE_SECONDS

pytestmark = pytest.mark.unit
Json = dict[str, Any]
RUNTIME = Path(__file__).resolve().parents[3] / "k8s" / "overlays" / "trainer" / "runtime.yaml"
FORM = (*QUICKSTART, "kubernetes.form=trainjob", "kubernetes.trainjob={runtime: mlpipe}")
OLDER = "kubernetes.trainjob.overrides=podTemplateOverrides"
EVERYTHING = (
    "kubernetes.node_selector={pool: h100}",
    "kubernetes.tolerations=[{key: reserved}]",
    "kubernetes.image_pull_secrets=[registry]",
    "kubernetes.secret_env={HF_TOKEN: {secret: hub, key: token}}",
    "kubernetes.volumes=[{claim: data, path: /data, sub_path: a, read_only: true}]",
    "kubernetes.ca_bundle={config_map: company-ca}",
    "kubernetes.store={web_identity: {}}",
)


def gang(*overrides: str, stage: str = "train") -> Json:
    return stage_objects(plan_of(pipeline_of("quickstart", *overrides), stage))[-1]


def pods_of(trainjob: Json) -> Json:
    """What it says of the pod template, in either release's field."""
    spec = trainjob["spec"]
    if "podTemplateOverrides" in spec:
        (override,) = spec["podTemplateOverrides"]
        assert override["targetJobs"] == [{"name": "node"}]
        return {"metadata": override["metadata"], "spec": override["spec"]}
    (patch,) = spec["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template: Json = job["template"]["spec"]["template"]
    return template


def made_of(trainjob: Json) -> Json:
    """The JobSet that Trainer makes of it and the shipped runtime: jobset.go and trainingruntime.go of v2.1,
    which tests/cluster has do it."""
    jobset: Json = yaml.safe_load(RUNTIME.read_text())["spec"]["template"]
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["template"] = _merge(job["template"], pods_of(trainjob), "")
    trainer, (container,) = dict(trainjob["spec"]["trainer"]), job["template"]["spec"]["containers"]
    job |= dict.fromkeys(("completions", "parallelism"), trainer.pop("numNodes"))
    container |= {"resources": trainer.pop("resourcesPerNode"), **trainer}
    return jobset


@pytest.mark.parametrize("overrides", [(), (OLDER,)], ids=["2.2", "2.1"])
def test_with_the_shipped_runtime_it_is_the_jobset(overrides: tuple[str, ...]) -> None:
    found = gang(*FORM, *EVERYTHING, *overrides)
    ours = gang(*QUICKSTART, *EVERYTHING)["spec"]
    theirs = made_of(found)["spec"]
    (our_job,), (their_job,) = ours["replicatedJobs"], theirs["replicatedJobs"]
    our_pod, their_pod = (one["template"]["spec"].pop("template") for one in (our_job, their_job))
    assert their_pod["metadata"] == our_pod["metadata"]
    (our_container,), (their_container,) = (pod["spec"].pop("containers") for pod in (our_pod, their_pod))
    assert our_container.pop("name") == "worker"
    assert their_container.pop("name") == "node"
    our_env, their_env = (
        {one["name"]: one for one in container.pop("env")} for container in (our_container, their_container)
    )
    name = found["metadata"]["name"]
    assert their_env.pop("MLPIPE_RENDEZVOUS")["value"] == f"{name}-node-0-0.{name}:29500"
    assert our_env.pop("MLPIPE_RENDEZVOUS")["value"] == f"{name}-worker-0-0.{name}:29500"
    assert their_env == our_env
    assert their_container == our_container
    # the same for all gangs: which pods are spread, and the longest time to save
    (spread,) = their_pod["spec"].pop("topologySpreadConstraints")
    selector = spread.pop("labelSelector")["matchLabels"]
    assert selector.items() <= their_pod["metadata"]["labels"].items()
    (our_spread,) = our_pod["spec"].pop("topologySpreadConstraints")
    our_spread.pop("labelSelector")
    assert spread == our_spread
    assert their_pod["spec"].pop("terminationGracePeriodSeconds") == CEILING_SECONDS + GRACE_SECONDS
    our_pod["spec"].pop("terminationGracePeriodSeconds")
    for pod in (their_pod, our_pod):  # its name ends in a digest of the plan, which names the form
        (plan,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == "plan"]
        assert plan["configMap"].pop("name").startswith(f"{name}-plan-")
    assert their_pod == our_pod
    # what becomes of the gang
    rules = their_job["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"].pop("containerName") == "node"
    assert our_job["template"]["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"].pop("containerName")
    assert their_job["template"]["spec"] == our_job["template"]["spec"]
    assert theirs["failurePolicy"] == ours["failurePolicy"]
    assert theirs["network"] == {key: ours["network"][key] for key in theirs["network"]}
    assert "ttlSecondsAfterFinished" not in theirs  # Trainer 2.1 would make another JobSet


def test_jobset_and_job_are_found_by_the_labels_of_the_gang() -> None:
    found = gang(*FORM)
    labels = found["metadata"]["labels"]
    template = found["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]
    assert template["metadata"]["labels"] == labels
    assert template["spec"]["replicatedJobs"][0]["template"]["metadata"]["labels"] == labels
    assert gang(*FORM, OLDER)["spec"]["labels"] == labels


def test_other_stages_are_plain_jobs() -> None:
    assert gang(*FORM, stage="corpus")["kind"] == "Job"
    assert gang(*FORM, "evaluate.resources={nodes: 1}", stage="evaluate")["kind"] == "Job"


def test_only_the_newer_trainer_has_a_deadline() -> None:
    assert gang(*FORM, "train.timeout=90.2 s")["spec"]["activeDeadlineSeconds"] == 91
    assert "activeDeadlineSeconds" not in gang(*FORM, OLDER, "train.timeout=90.2 s")["spec"]


def test_without_a_runtime_nothing_is_rendered() -> None:
    plan = plan_of(pipeline_of("quickstart", *FORM), "train")
    assert plan.cluster is not None
    without = replace(plan, cluster=plan.cluster._replace(trainjob=None))
    with pytest.raises(RenderError, match="names the runtime") as caught:
        stage_objects(without)
    assert caught.value.where == "stage 'train'"
    assert "trainjob: {runtime: NAME}" in str(caught.value.hint)


POD = "kubernetes.patches=[{target: {kind: Pod, stage: train, component: worker}, strategic: {spec: %s}}]"


def test_patches_of_the_pod_are_carried_or_refused() -> None:
    env = "{containers: [{name: worker, env: [{name: NCCL_IB_HCA, value: mlx5}]}]}"
    pipeline = pipeline_of("quickstart", *FORM, POD % env)
    plan = plan_of(pipeline, "train")
    objects = stage_objects(plan)
    assert {"name": "NCCL_IB_HCA", "value": "mlx5"} in objects[-1]["spec"]["trainer"]["env"]
    assert lint_patches([plan], [objects, []]) == []
    words = "a TrainJob cannot say hostNetwork, priorityClassName of its pods"
    with pytest.raises(RenderError, match=words) as caught:
        gang(*FORM, POD % "{hostNetwork: true, priorityClassName: high}")
    assert caught.value.where == "stage 'train'"
    assert "another kubernetes.form" in str(caught.value.hint)
    lifecycle = "{containers: [{name: worker, lifecycle: {}}]}"
    with pytest.raises(RenderError, match=r"cannot say containers\[0\].lifecycle"):
        gang(*FORM, POD % lifecycle)


@pytest.mark.parametrize(
    ("overrides", "path"),
    [
        (
            (),
            "/spec/runtimePatches/0/trainingRuntimeSpec/template/spec/replicatedJobs/0/template/spec/template",
        ),
        ((OLDER,), "/spec/podTemplateOverrides/0"),
    ],
    ids=["2.2", "2.1"],
)
def test_pods_stay_to_be_found_by_their_labels(overrides: tuple[str, ...], path: str) -> None:
    for label in ("mlpipe.dev~1run", "app.kubernetes.io~1component"):
        operation = f"{{op: replace, path: {path}/metadata/labels/{label}, value: driver}}"
        patch = f"kubernetes.patches=[{{target: {{kind: TrainJob}}, json: [{operation}]}}]"
        with pytest.raises(RenderError, match=f"{path}/metadata/labels/{label}: .*it stays"):
            gang(*FORM, *overrides, patch)
    added = "{op: add, path: /metadata/labels/cost-centre, value: '42'}"
    found = gang(*FORM, *overrides, f"kubernetes.patches=[{{target: {{kind: TrainJob}}, json: [{added}]}}]")
    assert found["metadata"]["labels"]["cost-centre"] == "42"
