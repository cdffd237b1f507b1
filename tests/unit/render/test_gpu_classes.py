"""GPUs of several vendors, slices, shared ones and claims: what the pods ask for, and where they stand."""

from __future__ import annotations

from typing import Any

import pytest
from kit.manifests import check_schema
from kit.rendered import RUN_ID, pipeline_of, plan_of

from mlpipe._core.errors import PlanError
from mlpipe._core.gpus import TABLE, gpu_classes
from mlpipe._core.serial import to_plain
from mlpipe.plan.cluster import ClusterPlan
from mlpipe.plan.hardware import GPUS, detect_hardware
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import driver_objects, stage_objects
from mlpipe.spec.model import Resources

pytestmark = pytest.mark.unit
Json = dict[str, Any]


def llm(*overrides: str, stage: str = "train") -> Plan:
    return plan_of(pipeline_of("llm", *overrides), stage)


def one_gpu(gpu: str, *overrides: str) -> Plan:
    """A command, which any GPU takes."""
    return llm(f"corpus.resources={{gpus_per_node: 1, gpu: {gpu}}}", *overrides, stage="corpus")


def pod_of(plan: Plan) -> Json:
    body = stage_objects(plan)[-1]
    if body["kind"] == "JobSet":
        body = body["spec"]["replicatedJobs"][0]["template"]
    spec: Json = body["spec"]["template"]["spec"]
    return spec


def limits_of(pod: Json) -> dict[str, str]:
    limits: dict[str, str] = pod["containers"][0]["resources"]["limits"]
    return {name: amount for name, amount in limits.items() if "/" in name}


def terms_of(pod: Json) -> list[tuple[str, str, list[str]]]:
    required = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = required["nodeSelectorTerms"]
    return [(one["key"], one["operator"], one["values"]) for one in term["matchExpressions"]]


@pytest.mark.parametrize(
    ("gpu", "overrides", "resource", "terms"),
    [
        ("L4", (), "nvidia.com/gpu", [("nvidia.com/gpu.product", "In", ["NVIDIA-L4"])]),
        (
            "MI300X",
            (),
            "amd.com/gpu",
            [("amd.com/gpu.product-name", "In", ["AMD_Instinct_MI300X_OAM"])],
        ),
        (
            "MAX-1550",
            (),
            "gpu.intel.com/xe",
            [("gpu.intel.com/product", "In", ["Max_1550"])],
        ),
        (
            "H100-80GB",
            ("corpus.resources.slice=1g.10gb",),
            "nvidia.com/mig-1g.10gb",
            [("nvidia.com/gpu.product", "In", ["NVIDIA-H100-80GB-HBM3"])],
        ),
        (
            "H100-80GB",  # nodes whose plugin calls a slice a GPU
            ("corpus.resources.slice=1g.10gb", "kubernetes.gpu_product=NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"),
            "nvidia.com/gpu",
            [("nvidia.com/gpu.product", "In", ["NVIDIA-H100-80GB-HBM3-MIG-1g.10gb"])],
        ),
        (
            "L4",
            ("corpus.resources.gpu_sharing=time-slicing",),
            "nvidia.com/gpu",
            [
                ("nvidia.com/gpu.product", "In", ["NVIDIA-L4-SHARED"]),
                ("nvidia.com/gpu.sharing-strategy", "In", ["time-slicing"]),
            ],
        ),
    ],
)
def test_a_pod_asks_in_its_vendors_words(
    gpu: str, overrides: tuple[str, ...], resource: str, terms: list[tuple[str, str, list[str]]]
) -> None:
    pod = pod_of(one_gpu(gpu, *overrides))
    assert limits_of(pod) == {resource: "1"}
    assert terms_of(pod) == terms
    taint = resource.replace("mig-1g.10gb", "gpu")
    assert pod["tolerations"] == [{"key": taint, "operator": "Exists", "effect": "NoSchedule"}]


def test_a_resource_of_ones_own_has_its_own_taint() -> None:
    described = "corpus.resources.device={memory: 128 GiB, fp32_tflops: 52}"
    alone = "train.resources={gpus_per_node: 1, gpu: L4}"  # a gang on shared GPUs is refused
    pods = [
        pod_of(one_gpu(gpu, f"kubernetes.gpu_resource={resource}", described, alone))
        for gpu, resource in (("MAX-1550", "gpu.intel.com/i915"), ("L4", "nvidia.com/gpu.shared"))
    ]
    assert [limits_of(pod) for pod in pods] == [{"gpu.intel.com/i915": "1"}, {"nvidia.com/gpu.shared": "1"}]
    assert [pod["tolerations"][0]["key"] for pod in pods] == ["gpu.intel.com/i915", "nvidia.com/gpu"]


def test_a_gang_on_gpus_of_no_known_product_keeps_off_those_that_others_use() -> None:
    described = "device={memory: 94 GiB, fp32_tflops: 60, bf16_tflops: 800}"
    gang = llm("train.resources.gpu=X1", f"train.resources.{described}")
    assert terms_of(pod_of(gang)) == [("nvidia.com/gpu.sharing-strategy", "NotIn", ["mps", "time-slicing"])]
    alone = one_gpu("X1", f"corpus.resources.{described}")
    assert "affinity" not in pod_of(alone)


def test_a_slice_has_its_part_of_the_gpu() -> None:
    def of(**resources: Any) -> Any:
        return detect_hardware(Resources.model_validate({"gpus_per_node": 1, "gpu": "H200", **resources}))

    whole, part = of(), of(slice="3g.71gb")
    assert part.name == "H200 3g.71gb"
    assert part.memory_bytes == 4 * 16384 * 2**20
    assert part.peak_flops == pytest.approx({name: peak * 3 / 7 for name, peak in whole.peak_flops.items()})
    assert part.speed.memory_bytes_per_second == whole.speed.memory_bytes_per_second / 2
    assert part.price_usd_per_device_hour == pytest.approx(3.99 * 3 / 7)
    assert of(slice="3g.71gb", price_usd_per_gpu_hour=1.5).price_usd_per_device_hour == 1.5
    with pytest.raises(PlanError, match=r"H200 has no slice '1g\.10gb'") as caught:
        of(slice="1g.10gb")
    assert caught.value.hint == "write one of 1g.18gb, 1g.35gb, 2g.35gb, 3g.71gb, 4g.71gb, 7g.141gb"


def test_slices_are_no_larger_than_their_gpu() -> None:
    """And their names, which have the vendor's rounding, say about what they have."""
    for gpu, known in gpu_classes().items():
        for name, part in known.slices.items():
            assert known.slice_bytes(name) <= GPUS[gpu].memory_bytes * part.eighths / 8
            assert part.sevenths == int(name[0])
            told = int(name.partition(".")[2].removesuffix("gb")) * 10**9
            assert 0.9 * told < known.slice_bytes(name) < 1.1 * told
    assert '"sources"' in TABLE.read_text()


def test_gpus_by_claims() -> None:
    plan = llm("kubernetes.gpu_claims={}")
    config, template, _ = stage_objects(plan)
    assert (config["kind"], template["kind"]) == ("ConfigMap", "ResourceClaimTemplate")
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert (request["exactly"]["allocationMode"], request["exactly"]["count"]) == ("ExactCount", 8)
    assert request["exactly"]["selectors"] == [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].productName == 'NVIDIA H100 80GB HBM3'"}}
    ]
    pod = pod_of(plan)
    assert pod["resourceClaims"] == [
        {"name": "gpus", "resourceClaimTemplateName": template["metadata"]["name"]}
    ]
    assert pod["containers"][0]["resources"]["claims"] == [{"name": "gpus"}]
    assert limits_of(pod) == {}
    assert "affinity" not in pod
    for body in stage_objects(plan)[:2]:
        check_schema(body)
    cpu = llm("kubernetes.gpu_claims={}", stage="corpus")
    assert [body["kind"] for body in stage_objects(cpu)] == ["ConfigMap", "Job"]
    assert "resourceClaims" not in pod_of(cpu)


def test_a_claim_for_a_slice_and_for_what_nobody_knows() -> None:
    sliced = one_gpu("H100-80GB", "corpus.resources.slice=1g.10gb", "kubernetes.gpu_claims={}")
    assert sliced.cluster is not None
    assert to_plain(sliced.cluster.gpu_claims) == {
        "device_class": "mig.nvidia.com",
        "expression": "device.attributes['gpu.nvidia.com'].profile == '1g.10gb'",
    }
    described = "corpus.resources.device={memory: 94 GiB, fp32_tflops: 60}"
    unknown = one_gpu("X1", described, "kubernetes.gpu_claims.device_class=x")
    assert unknown.cluster is not None
    assert to_plain(unknown.cluster.gpu_claims) == {"device_class": "x", "expression": None}
    with pytest.raises(PlanError, match="nobody knows the device class of 'X1'"):
        one_gpu("X1", described, "kubernetes.gpu_claims={}")


PLACED = (
    "kubernetes.node_selector={zone: a}",
    "kubernetes.priority_class=low",
    "kubernetes.gpu_pods={node_selector: {pool: h100}, tolerations: [{key: spot}]}",
    "kubernetes.stages={evaluate: {priority_class: high, node_selector: {}}}",
)


def test_a_stage_without_gpus_does_not_follow_their_selector() -> None:
    pods = {stage: pod_of(llm(*PLACED, stage=stage)) for stage in ("corpus", "train", "evaluate")}
    assert {stage: pod.get("nodeSelector") for stage, pod in pods.items()} == {
        "corpus": {"zone": "a"},
        "train": {"pool": "h100"},
        "evaluate": None,
    }
    assert {stage: pod["priorityClassName"] for stage, pod in pods.items()} == {
        "corpus": "low",
        "train": "low",
        "evaluate": "high",
    }
    keys = {stage: [one.get("key") for one in pod["tolerations"]] for stage, pod in pods.items()}
    assert keys == {
        "corpus": ["nvidia.com/gpu"],
        "train": ["nvidia.com/gpu", "spot"],
        "evaluate": ["nvidia.com/gpu", "spot"],
    }


@pytest.mark.parametrize("first", ["corpus", "train"])
def test_neither_does_the_driver_nor_the_coordinator(first: str) -> None:
    """Whichever stage's plan tells of the run."""
    plan = llm(*PLACED, "train.resources.nodes=1..2", "train.strategy=fsdp", stage=first)
    assert plan.cluster is not None
    (driver,) = driver_objects(
        RUN_ID, plan.store_url, plan.cluster, stage=None, spec_digest="", seal="TEXT:SET"
    )
    pods = [driver["spec"]["template"]["spec"]]
    if first == "train":
        coordinator = stage_objects(plan)[1]
        args = coordinator["spec"]["template"]["spec"]["containers"][0]["args"]
        assert args[:4] == ["-P", "-m", "mlpipe.train.coordinate", "--plan"]
        pods.append(coordinator["spec"]["template"]["spec"])
        assert "affinity" not in pods[-1], "it has no GPU, and goes where there is none"
    assert [pod["nodeSelector"] for pod in pods] == [{"zone": "a"}] * len(pods)
    assert not [one for pod in pods for one in pod["tolerations"] if one.get("key") == "spot"]


@pytest.mark.parametrize(
    "devices",
    [
        ("kubernetes.gpu_claims={}",),
        ("network={profile: efa, hugepages: 1 GiB}",),
        ("kubernetes.rdma={resource: rdma/hca}",),
        (
            "train.resources.gpu=X1",
            "train.resources.device={memory: 94 GiB, fp32_tflops: 60, bf16_tflops: 800}",
        ),
    ],
    ids=["claims", "network", "rdma", "unknown"],
)
def test_the_coordinator_asks_for_no_device(devices: tuple[str, ...]) -> None:
    """And goes where the run's pods may, from a node that is lost sooner than they."""
    elastic = ("train.resources.nodes=1..2", "train.strategy=fsdp", "train.metrics_port=off")
    objects = stage_objects(llm(*devices, *elastic, "kubernetes.tolerations=[{key: team}]"))
    (pod,) = [
        body["spec"]["template"]["spec"]
        for body in objects
        if "mlpipe.train.coordinate" in str(body.get("spec"))
    ]
    (container,) = pod["containers"]
    amounts = {"memory": "256Mi", "ephemeral-storage": "256Mi"}
    assert container["resources"] == {"requests": {"cpu": "100m", **amounts}, "limits": amounts}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not {"affinity", "resourceClaims", "topologySpreadConstraints"} & pod.keys()
    assert {one["name"] for one in pod["volumes"]} == {"plan", "scratch", "shm", "cache", "tmp", "claim-0"}
    assert [(one["key"], one.get("tolerationSeconds")) for one in pod["tolerations"]] == [
        ("team", None), ("node.kubernetes.io/not-ready", 30), ("node.kubernetes.io/unreachable", 30),
    ]  # fmt: skip
    assert "MLPIPE_RENDEZVOUS" not in {one["name"] for one in container["env"]}


def test_nodes_that_are_taken_first_are_not_required() -> None:
    spot = "kubernetes.gpu_pods={prefer: {capacity: spot, zone: a}}"
    affinity = pod_of(llm(spot))["affinity"]["nodeAffinity"]
    (first,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert first["weight"] == 100
    assert first["preference"]["matchExpressions"] == [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in (("capacity", "spot"), ("zone", "a"))
    ]
    assert terms_of(pod_of(llm(spot))) == terms_of(pod_of(llm()))
    assert "affinity" not in pod_of(llm(spot, stage="corpus"))
    everywhere = llm("kubernetes.prefer={capacity: spot}", "kubernetes.gpu_pods={prefer: {}}", stage="train")
    assert list(pod_of(everywhere)["affinity"]["nodeAffinity"]) == [
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert Plan.from_json(everywhere.to_json()) == everywhere


def test_what_says_nothing_of_classes_is_written_as_before() -> None:
    new = {"gpu_label", "gpu_sharing", "sharing_label", "gpu_claims", "gpu_taint", "run_placement"}
    plain = to_plain(llm().cluster)
    assert new & plain.keys() == set()
    assert set(ClusterPlan._fields) - plain.keys() >= new
    placed = llm(*PLACED)
    assert Plan.from_json(placed.to_json()) == placed
    assert to_plain(placed.cluster)["run_placement"]["node_selector"] == {"zone": "a"}
