"""The network of a gang: what its profile gives ranks, pods, planner and preflight."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from kit.manifests import check_schema
from kit.rendered import PIPELINES, pipeline_of, plan_of

from mlpipe._core.networks import profiles
from mlpipe._core.serial import to_plain
from mlpipe.cli.doctor import _networks
from mlpipe.cli.plan import command as plan_verb
from mlpipe.cli.session import CliSession
from mlpipe.plan.build import stage_hardware
from mlpipe.plan.hardware import GPUS
from mlpipe.plan.plan import Plan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.lint import lint
from mlpipe.spec.network import NetworkProfile, Networks, origin
from mlpipe.spec.problems import SpecErrors
from mlpipe.spec.schema import json_schema
from mlpipe.submit.seal import Seal, changed
from mlpipe.submit.submission import Submission

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
    assert {"nvidia.com/gpu", "cpu", "memory"} < limits.keys()  # beside what a pod has without it
    found = variables(plan)
    assert (found["FI_PROVIDER"], found["MY_OWN"], found["FI_EFA_USE_DEVICE_RDMA"]) == ("other", "2", "1")
    assert found["NCCL_TOPO_FILE"] == "/mlpipe/network/topology.xml"
    volumes = {one["name"]: one for one in template_of(plan)["spec"]["volumes"]}
    items = [{"key": "p5.xml", "path": "topology.xml"}]
    assert volumes["network"] == {"name": "network", "configMap": {"name": "nccl", "items": items}}
    mounts = {one["name"]: one for one in worker_of(plan)["volumeMounts"]}
    assert mounts["network"] == {"name": "network", "mountPath": "/mlpipe/network", "readOnly": True}
    assert mounts["hugepages"] == {"name": "hugepages", "mountPath": "/dev/hugepages"}
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


RACKS = "network.racks={nodes: 1, gb_per_second: 0.5}"


def test_links_between_racks_are_slower_than_those_inside() -> None:
    """The pipeline's word goes before that of a profile; a description of the GPU is of its own rack."""
    named = "network={profile: {extends: infiniband, racks: {nodes: 16, gb_per_second: 12.5}}}"
    for overrides, nodes, rate in (
        ((named,), 16, 12.5e9),
        ((named, RACKS), 1, 0.5e9),
        (("network.profile=own", RACKS, "train.resources.device={network_gb_per_second: 7}"), 1, 0.5e9),
        (("network.profile=efa",), 0, 0.0),
    ):
        found = stage_hardware(pipeline_of("llm", *overrides), "train").speed
        assert (found.rack_nodes, found.rack_bytes_per_second) == (nodes, rate)
    same = ("train.strategy=fsdp", "train.activation_checkpointing=selective", "train.accumulation=8")
    inside, across = (
        llm("network.profile=infiniband", *same, *more).work.training.predicted for more in ((), (RACKS,))
    )
    assert across.step_seconds > inside.step_seconds


def test_a_preflight_wants_a_port_where_the_profile_does() -> None:
    def wanted(*overrides: str) -> bool | None:
        preflight = llm("train.resources.preflight=auto", *overrides).launch.preflight
        return preflight and preflight.rdma

    assert wanted("network.profile=roce") is True
    assert (
        wanted("network={profile: roce, rdma: false}") is wanted("network.profile=tcpx") is wanted() is False
    )


def test_a_link_on_which_rdma_is_not_used_is_too_slow() -> None:
    """An H100 sends 50 GB/s by InfiniBand; without it no more is asked of a link than before."""

    def least(*overrides: str, limits: str = "auto") -> float | None:
        preflight = llm(f"train.resources.preflight={limits}", *overrides).launch.preflight
        return preflight and preflight.link_bytes_per_second

    assert least() is least("network.profile=ethernet") is None
    assert least("network.profile=infiniband") == 25e9
    assert least("network.profile=infiniband", limits="{slow_ratio: 0.8}") == 40e9
    assert least("network.profile=infiniband", limits="{link_gb_per_second: 3}") == 3e9
    assert least("network.profile=infiniband", RACKS) == 0.25e9


SCHEMA = jsonschema.Draft202012Validator(json_schema(Networks))
RAILS = """version: 1
networks:
  rails:
    extends: infiniband
    gb_per_second: {default: 12.5, H100-80GB: 37.5}
    env: {NCCL_IB_HCA: mlx5, NCCL_NET: IBext}
    resources: {rdma/ib: 0, nvidia.com/mlnxnics: {default: 2, H100-80GB: 8}}
    annotations: {k8s.v1.cni.cncf.io/networks: "rail-0,rail-1"}
    topology: {config_map: nccl-topology}
"""


@pytest.fixture
def rails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "networks.yaml"
    path.write_text(RAILS)
    monkeypatch.setenv("MLPIPE_NETWORKS", str(path))
    return path


def test_a_platforms_own_profile_stands_written_out_in_what_is_kept(
    rails: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes on with the run has no such file, or another: a driver's pod, say."""
    asked = ("network={profile: rails, env: {NCCL_DEBUG: INFO}}", "network.env.NCCL_IB_HCA=mlx5_9")
    pipeline, text = pipeline_of("llm", *asked), (PIPELINES / "llm.yaml").read_text()
    kept = Submission("llm.yaml", text, asked, pipeline, pipeline.store, ".").overrides
    assert kept[:-1] == asked
    monkeypatch.setenv("MLPIPE_NETWORKS", str(tmp_path / "none.yaml"))
    again = pipeline_of("llm", *kept)
    assert again.digest == pipeline.digest
    assert Submission("llm.yaml", text, kept, again, again.store, ".").overrides == kept
    for plan in (plan_of(pipeline, "train"), plan_of(again, "train")):
        limits, found = worker_of(plan)["resources"]["limits"], variables(plan)
        assert limits["nvidia.com/mlnxnics"] == "8"
        assert "rdma/ib" not in limits
        words = {"NCCL_NET": "IBext", "NCCL_IB_HCA": "mlx5_9", "NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "INFO"}
        assert words.items() <= found.items()
        assert found["NCCL_TOPO_FILE"] == "/mlpipe/network/topology.xml"
        assert worker_of(plan)["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
        assert template_of(plan)["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] == "rail-0,rail-1"
    assert stage_hardware(again, "train").speed.network_bytes_per_second == 37.5e9
    seal = Seal(text, (), "kubernetes")
    monkeypatch.setenv("MLPIPE_NETWORKS", str(rails))
    assert changed(seal, asked).overrides == kept  # of a resume, which may name one, too
    monkeypatch.setenv("MLPIPE_NETWORKS", str(rails))
    assert speed("network.profile=rails", "network.gb_per_second=3") == 3e9
    preflight = llm("network.profile=rails", "train.resources.preflight=auto").launch.preflight
    assert preflight is not None
    assert preflight.rdma


def test_which_file_a_profile_is_of(rails: Path) -> None:
    assert origin(pipeline_of("llm", "network.profile=rails").network) == f"rails, of {rails}:3:3"
    assert origin(pipeline_of("llm", "network.profile=efa").network) is None
    argv = [str(PIPELINES / "llm.yaml"), "--stage=train", "--set=network.profile=rails"]
    told = CliRunner().invoke(plan_verb, argv, obj=CliSession())
    assert f"network: rails, of {rails}:3:3" in told.output
    (found,) = _networks()
    assert (found.level, found.detail) == ("ok", f"{rails}: rails")
    SCHEMA.validate(yaml.safe_load(RAILS))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("env: {LD_PRELOAD: /x.so}", "8:11: 'LD_PRELOAD' is not a variable of networks"),
        ("env: {AWS_ROLE_ARN: x}", "8:11: 'AWS_ROLE_ARN' is not a variable of networks"),
        (
            "annotations: {iam.amazonaws.com/role: admin}",
            "8:19: 'iam.amazonaws.com/role' is not an annotation",
        ),
        ("resources: {nvidia.com/gpu: 8}", "8:17: 'nvidia.com/gpu' is not a device of networks"),
        ("service_account: admin", "8:5: unknown key 'service_account'"),
        ("extends: rails", "8:14: unknown value 'rails'; write one of infiniband"),
        ("hugepages: 5", "8:16: 5 has no unit"),
        ("gb_per_second: {H100-80GB: 5}", "figures by class of GPU, and none of all others"),
    ],
)
def test_a_profile_says_of_networks_alone(rails: Path, line: str, words: str) -> None:
    """Whoever names it does not read it; what it may not say has its line in the file."""
    kept = [one for one in RAILS.splitlines() if not one.strip().startswith(line.split(":")[0] + ":")]
    rails.write_text("\n".join([*kept[:7], f"    {line}", ""]))
    with pytest.raises(SpecErrors) as caught:
        pipeline_of("llm", "network.profile=rails")
    assert str(rails) in str(caught.value)
    assert words in str(caught.value)
    assert not SCHEMA.is_valid(yaml.safe_load(rails.read_text()))


def test_a_profile_that_is_not_there_or_built_in(rails: Path) -> None:
    with pytest.raises(SpecErrors, match="unknown network 'rail'; did you mean 'rails'"):
        pipeline_of("llm", "network.profile=rail")
    with pytest.raises(SpecErrors, match=f"write one of .*own, rails, or describe it in {rails}"):
        pipeline_of("llm", "network.profile=xyz")
    rails.write_text("version: 1\nnetworks:\n  efa: {}\n")
    with pytest.raises(SpecErrors, match="yaml:3:3: 'efa' is built in"):
        pipeline_of("llm", "network.profile=x")
    assert speed("network.profile=efa") == 50e9  # no file is read for it
    (found,) = _networks()
    assert (found.level, found.detail) == ("fail", f"{rails}:3:3: 'efa' is built in")
    rails.write_text("networks: {a: {gb_per_second: x, b: 1}}\n")
    (found,) = _networks()
    assert found.detail == f"{rails}:1:1: 'version' is missing; and 2 more problems"
    rails.unlink()
    with pytest.raises(SpecErrors, match=r"networks\.yaml: cannot be read"):
        pipeline_of("llm", "network.profile=rails")
    assert set(profiles()) == set(get_args(get_args(NetworkProfile.model_fields["extends"].annotation)[0]))


def test_variables_of_the_launcher_are_no_networks() -> None:
    with pytest.raises(SpecErrors, match="MASTER_ADDR is set by torchrun"):
        pipeline_of("llm", "network={profile: own, env: {MASTER_ADDR: x}}")
