"""The network of a gang: what its profile gives ranks, pods, planner and preflight."""

from __future__ import annotations

from typing import Any

import pytest
from kit.manifests import check_schema
from kit.rendered import pipeline_of, plan_of

from mlpipe._core.networks import profiles
from mlpipe._core.serial import to_plain
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.lint import lint

pytestmark = pytest.mark.unit
Json = dict[str, Any]


def llm(*overrides: str, stage: str = "train") -> Plan:
    return plan_of(pipeline_of("llm", *overrides), stage)


def template_of(plan: Plan) -> Json:
    body = stage_objects(plan)[-1]
    check_schema(body) if body["kind"] == "Job" else None
    if body["kind"] == "JobSet":
        body = body["spec"]["replicatedJobs"][0]["template"]
    template: Json = body["spec"]["template"]
    return template


def variables(plan: Plan) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in worker_of(plan)["env"]}


def worker_of(plan: Plan) -> Json:
    container: Json = template_of(plan)["spec"]["containers"][0]
    return container


def speed(*overrides: str) -> float:
    return stage_hardware(pipeline_of("llm", *overrides), "train").speed.network_bytes_per_second


@pytest.mark.parametrize("name", profiles())
def test_a_profile_reaches_ranks_and_pods(name: str) -> None:
    profile, plan = profiles()[name], llm(f"network.profile={name}", "kubernetes.form=indexed-job")
    assert profile.env.items() <= plan.launch.env.items()  # on every backend
    assert profile.env.items() <= variables(plan).items()
    limits = worker_of(plan)["resources"]["limits"]
    assert {
        key: str(count) for key, count in profile.resources_of("H100-80GB").items()
    }.items() <= limits.items()
    assert profile.annotations.items() <= template_of(plan)["metadata"]["annotations"].items()
    added = worker_of(plan)["securityContext"]["capabilities"].get("add", [])
    assert added == (["IPC_LOCK"] if profile.pinned_memory else [])
    assert ("hugepages-2Mi" in limits) == (profile.hugepages is not None)
    assert speed(f"network.profile={name}") == profile.speed_of("H100-80GB")


def test_what_the_pipeline_says_stands_in_place_of_the_profiles() -> None:
    own = (
        "network={profile: efa, gb_per_second: 40, env: {FI_PROVIDER: other, MY_OWN: '1'}, resources: "
        "{vpc.amazonaws.com/efa: 16, my/nic: 2}, annotations: {k8s.v1.cni.cncf.io/networks: 'a,b'}, "
        "hugepages: 1 GiB, pinned_memory: true, topology: {config_map: nccl, key: p5.xml}}"
    )
    plan = llm(own, "train.env.MY_OWN=2")
    limits = worker_of(plan)["resources"]["limits"]
    assert (limits["vpc.amazonaws.com/efa"], limits["my/nic"], limits["hugepages-2Mi"]) == ("16", "2", "1Gi")
    found = variables(plan)
    assert (found["FI_PROVIDER"], found["MY_OWN"], found["FI_EFA_USE_DEVICE_RDMA"]) == ("other", "2", "1")
    assert found["NCCL_TOPO_FILE"] == "/mlpipe/network/topology.xml"
    volumes = {one["name"]: one for one in template_of(plan)["spec"]["volumes"]}
    assert volumes["network"]["configMap"]["items"] == [{"key": "p5.xml", "path": "topology.xml"}]
    assert volumes["hugepages"]["emptyDir"] == {"medium": "HugePages-2Mi"}
    assert speed(own) == 40e9
    assert template_of(plan)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "a,b"
    assert any("enforce=privileged" in line for line in lint(plan))
    without = worker_of(llm("network={profile: efa, resources: {vpc.amazonaws.com/efa: 0}}"))
    assert "vpc.amazonaws.com/efa" not in without["resources"]["limits"]
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("stage", "overrides"),
    [("train", ("train.resources.nodes=1", "train.strategy=fsdp")), ("corpus", ())],
)
def test_it_is_for_gangs_of_gpus(stage: str, overrides: tuple[str, ...]) -> None:
    plain, plan = (llm(*overrides, *more, stage=stage) for more in ((), ("network.profile=infiniband",)))
    assert plan.launch.env == plain.launch.env
    assert to_plain(plan.cluster) == to_plain(plain.cluster)


def test_the_planner_reckons_with_its_links() -> None:
    """Whoever describes the GPU's own links is believed; `own` says nothing."""
    described = "train.resources.device={network_gb_per_second: 7}"
    assert speed("network.profile=ethernet", described) == 7e9
    assert speed("network.profile=own") == speed() == GPUS["H100-80GB"].network_bytes_per_second
    slow, fast = (
        llm(f"network.profile={name}").work.training.predicted for name in ("ethernet", "infiniband")
    )
    assert slow.step_seconds > fast.step_seconds


def test_a_preflight_wants_a_port_where_the_profile_does() -> None:
    def wanted(*overrides: str) -> bool | None:
        preflight = llm("train.resources.preflight=auto", *overrides).launch.preflight
        return preflight and preflight.rdma

    assert wanted("network.profile=roce") is True
    assert (
        wanted("network={profile: roce, rdma: false}") is wanted("network.profile=tcpx") is wanted() is False
    )
