"""What is sent to a cluster for shipped pipelines, byte for byte but for the digest of mlpipe's code.

`MLPIPE_UPDATE_GOLDEN=1` rewrites them; read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from kit.manifests import check_schema, crd_validator, load, trainer_validator
from kit.rendered import QUICKSTART, RUN_ID, pipeline_of, plan_of

import mlpipe
from mlpipe._core.yaml import documents
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.render.prepull import prepull_objects
from mlpipe.submit.kubernetes.manifests import waiting

pytestmark = pytest.mark.golden
HERE = Path(__file__).parent
EVERYTHING = (
    "kubernetes.namespace=ml",
    "kubernetes.queue=team-a",
    "kubernetes.queue_priority=high",
    "kubernetes.topology={required: example.com/rack}",
    "kubernetes.rdma={resource: rdma/hca, count: 8}",
    "kubernetes.shm=64 GiB",
    "kubernetes.image_pull_secrets=[registry]",
    "kubernetes.node_selector={pool: h100}",
    "kubernetes.tolerations=[{key: reserved, operator: Equal, value: ml, effect: NoSchedule}]",
    "kubernetes.priority_class=training",
    "kubernetes.runtime_class=nvidia",
    "kubernetes.env_from=[{secret: tracking}, {config_map: flags}]",
    "kubernetes.secret_env={HF_TOKEN: {secret: hub, key: token}}",
    "kubernetes.ca_bundle={config_map: company-ca}",
    "kubernetes.proxy={https: 'http://proxy.example.com:3128', no_proxy: [example.com]}",
    "kubernetes.store={secret: ml-runs, driver_secret: ml-driver, endpoint: 'https://s3.example.com', "
    "region: eu-central-1}",
    "kubernetes.scratch={size: 500 GiB, storage_class: local-nvme}",
    "train.timeout=3 d",
    "kubernetes.patches=[{target: {kind: Pod, stage: train}, strategic: {spec: {hostNetwork: true, "
    "containers: [{name: worker, env: [{name: NCCL_IB_HCA, value: mlx5}]}]}}}, "
    "{target: {kind: JobSet}, json: [{op: add, path: /metadata/labels/cost-centre, value: '42'}]}]",
)
TRAINJOB = (
    *QUICKSTART,
    "kubernetes.form=trainjob",
    "kubernetes.trainjob={runtime: mlpipe}",
    "kubernetes.namespace=ml",
    "kubernetes.node_selector={pool: h100}",
    "kubernetes.tolerations=[{key: reserved}]",
    "kubernetes.image_pull_secrets=[registry]",
    "kubernetes.secret_env={HF_TOKEN: {secret: hub, key: token}}",
    "kubernetes.volumes=[{claim: data, path: /data, read_only: true}]",
)
# The second one's nodes are told from others by a label of one's own.
GROUPS = (
    "train.resources=[{nodes: 2, gpus_per_node: 8, gpu: H100-80GB}, {nodes: 4, gpus_per_node: 8, "
    "gpu: A100-80GB, cpus: 96, memory: 900 GiB, node_selector: {pool: old}}]"
)
CASES = {
    "jobset": ("quickstart", "train", QUICKSTART),
    "indexed-job": ("quickstart", "train", (*QUICKSTART, "kubernetes.form=indexed-job")),
    "trainjob": ("quickstart", "train", (*TRAINJOB, "train.timeout=3 d", "kubernetes.queue=team-a")),
    "trainjob-2.1": (
        "quickstart",
        "train",
        (*TRAINJOB, "kubernetes.trainjob.overrides=podTemplateOverrides"),
    ),
    "volcano": ("quickstart", "train", (*QUICKSTART, "kubernetes.volcano_queue=research")),
    "elastic": (
        "quickstart",
        "train",
        (*QUICKSTART, "train.resources.nodes=2..3", "kubernetes.queue=team-a"),
    ),
    "groups": (
        "llm",
        "train",
        (GROUPS, "kubernetes.queue=team-a", "kubernetes.stages={train: {priority_class: mlpipe-high}}"),
    ),
    "evaluate": ("quickstart", "evaluate", (*QUICKSTART, "evaluate.resources={nodes: 1}")),
    "command": ("llm", "corpus", ()),
    "gpu": ("llm", "train", ()),
    "everything": ("llm", "train", EVERYTHING),
    "driver": ("llm", None, ()),
    "driver-everything": ("llm", None, EVERYTHING),
    "spares": (
        "quickstart",
        "train",
        (*QUICKSTART, "train.resources.preflight=auto", "train.resources.spares=1"),
    ),
    "prepull": ("llm", "*", ("kubernetes.prepull=true", "kubernetes.gpu_pods={node_selector: {pool: h100}}")),
}


def manifests(pipeline: str, stage: str | None, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    spec = pipeline_of(pipeline, *overrides)
    if stage == "*":
        plans = [plan_of(spec, one.name) for one in spec.stages]
        return prepull_objects(plans, waiting(spec, None), spec.digest)
    plan = plan_of(spec, stage or "train")
    if stage is not None:
        return stage_objects(plan)
    assert plan.cluster is not None
    return driver_objects(
        RUN_ID, plan.store_url, plan.cluster, stage=None, spec_digest=spec.digest, seal="TEXT:SET"
    )


@pytest.mark.parametrize("name", CASES)
def test_manifests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlpipe, "__version__", "0.0.0")
    text = documents(manifests(*CASES[name]))
    expected = HERE / "manifests" / f"{name}.yaml"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        expected.write_text(text)
    assert text == expected.read_text()


@pytest.mark.parametrize("path", sorted((HERE / "manifests").glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_fit_their_schemas(path: Path) -> None:
    """Of a JobSet the Job inside, which its controller creates as it is; itself: below."""
    for found in load(path.read_text()):
        check_schema(found)
        if found["kind"] == "JobSet":
            for replicated in found["spec"]["replicatedJobs"]:
                head = {"apiVersion": "batch/v1", "kind": "Job"}
                metadata = {**replicated["template"]["metadata"], "name": replicated["name"]}
                check_schema({**head, "metadata": metadata, "spec": replicated["template"]["spec"]})


@pytest.fixture(scope="module")
def jobset_schema() -> Any:
    return crd_validator("jobset", "jobsets", "v1alpha2")


@pytest.mark.parametrize("name", ["jobset", "volcano", "gpu", "groups", "everything", "spares"])
def test_jobsets_fit_their_crd(name: str, jobset_schema: Any) -> None:
    found = list(load((HERE / "manifests" / f"{name}.yaml").read_text()))[-1]
    assert found["kind"] == "JobSet"
    jobset_schema.validate(found)
    found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["nonsense"] = 1
    assert not jobset_schema.is_valid(found)


@pytest.mark.parametrize(("name", "version"), [("trainjob", "v2.3.0"), ("trainjob-2.1", "v2.1.0")])
def test_trainjobs_fit_their_crd(name: str, version: str) -> None:
    """Which of the other release would drop half of it."""
    found = list(load((HERE / "manifests" / f"{name}.yaml").read_text()))[-1]
    assert found["kind"] == "TrainJob"
    trainer_validator("trainjobs", version).validate(found)
    other = {"v2.3.0": "v2.1.0", "v2.1.0": "v2.3.0"}[version]
    assert not trainer_validator("trainjobs", other).is_valid(found)


def test_every_file_has_its_case() -> None:
    assert {path.stem for path in (HERE / "manifests").glob("*.yaml")} == set(CASES)
