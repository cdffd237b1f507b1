"""charts/mlpipe: lint, every example, the schema of the values, and equality with the Kustomize base.

`MLPIPE_UPDATE_GOLDEN=1` rewrites the golden file; read the difference before committing it.
"""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
from functools import cache
from ipaddress import ip_network
from pathlib import Path

import jsonschema
import pytest
import yaml
from kit import manifests
from kit.helm import binary, helm
from kit.servers import ServerMissingError

from mlpipe.plan.build import Start, build_plan
from mlpipe.plan.hardware import GIB, Hardware
from mlpipe.render.kubernetes import labels, stage_objects
from mlpipe.render.patches import SELECTED
from mlpipe.spec.load import load_pipeline

pytestmark = pytest.mark.golden
ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "mlpipe"
EXAMPLES = sorted((CHART / "ci").glob("*-values.yaml"))
CRDS = (
    "kueue.x-k8s.io/v1beta2/ClusterQueue",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
)
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


@pytest.fixture(autouse=True, scope="module")
def _needs_helm():
    try:
        binary()
    except ServerMissingError as error:
        pytest.skip(str(error))


@cache
def _template(*options: str | Path, crds: tuple[str, ...] = CRDS) -> str:
    known = [word for crd in crds for word in ("--api-versions", crd)]
    done = helm("template", "mlpipe", CHART, "--namespace", "mlpipe", *known, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _refused(*options: str, crds: tuple[str, ...] = ()) -> str:
    known = [word for crd in crds for word in ("--api-versions", crd)]
    done = helm("template", "mlpipe", CHART, "--namespace", "mlpipe", *known, *options)
    assert done.returncode != 0
    assert done.stdout == ""
    return done.stderr


@cache
def _kustomized(name: str) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH: it builds k8s/. Install kubectl")
    command = ["kubectl", "kustomize", str(ROOT / "k8s" / name)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def _by_name(text: str) -> dict[tuple[str, str], dict]:
    """(kind, name) -> the object without its labels, which name the tool that installed it."""
    objects = {(one["kind"], one["metadata"]["name"]): one for one in manifests.load(text)}
    for one in objects.values():
        one["metadata"].pop("labels", None)
    return objects


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_lint(example):
    done = helm("lint", "--strict", CHART, "--values", example)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", [CHART / "values.yaml", *EXAMPLES], ids=lambda path: path.stem)
def test_every_example_renders_what_the_schemas_allow(example):
    objects = list(manifests.load(_template("--values", example)))
    assert objects
    for one in objects:
        manifests.check_schema(one)
        assert one["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def test_the_full_example_byte_for_byte():
    text = _template("--values", CHART / "ci" / "full-values.yaml")
    golden = Path(__file__).parent / "chart" / "full.yaml"
    if os.environ.get("MLPIPE_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_the_chart_and_the_kustomize_base_are_the_same():
    chart, base = _by_name(_template()), _by_name(_kustomized("base"))
    assert base.pop(("Namespace", "mlpipe"))
    assert chart == base


def test_a_name_that_yaml_takes_for_something_else_stays_a_name():
    """Namespaces and accounts may be called 42, no or 0x1."""
    names = {"namespace.name": "42", "driver.serviceAccount.name": "no", "worker.serviceAccount.name": "0x1"}
    names |= {
        "exporter.secret": "on",
        "kueue.name": "017",
        "kueue.flavors[0].name": "7",
        "kueue.cohort": "true",
    }
    names |= {
        "networkPolicy.prometheusNamespace": "1",
        "dashboards.namespace": "2",
        "exporter.store": "s3://a",
    }
    names |= {
        "kueue.flavors[0].topologyName": "null",
        "kueue.flavors[0].quota.cpu": "4",
        "exporter.image": "a",
    }
    options = [f"--set-string={key}={name}" for key, name in names.items()]
    switches = ("kueue", "exporter", "dashboards", "nodeEvents", "guardrails", "podMonitor", "prometheusRule")
    options += [f"--set={key}.enabled=true" for key in switches] + ["--set=guardrails.images={a}"]
    known = [f"--api-versions={crd}" for crd in CRDS]
    done = helm("template", "8", CHART, "--namespace", "9", *known, *options)
    assert done.returncode == 0, done.stderr
    objects = [one for one in yaml.safe_load_all(done.stdout) if one is not None]
    texts = {"name", "namespace", "kubernetes.io/metadata.name", "app.kubernetes.io/instance", "cohortName"}
    texts |= {"serviceAccountName", "topologyName", "clusterQueue"}
    found = [(key, value) for one in objects for key, value in _leaves(one) if key in texts]
    assert [pair for pair in found if not isinstance(pair[1], str)] == []
    said = {value for _, value in found}
    assert {"42", "no", "0x1", "on", "017", "7", "true", "1", "2", "null", "8"} <= said


def _leaves(value, key=""):
    if isinstance(value, dict | list):
        for inner, one in value.items() if isinstance(value, dict) else [(key, one) for one in value]:
            yield from _leaves(one, inner)
    else:
        yield key, value


def test_roles_are_those_of_the_base_whatever_the_values():
    base = _by_name(_kustomized("base"))
    for example in EXAMPLES:
        chart = _by_name(_template("--values", example))
        for name in ("mlpipe-driver", "mlpipe-submitter"):
            assert chart["Role", name]["rules"] == base["Role", name]["rules"]


OLDER = "kueue.x-k8s.io/v1beta1/ClusterQueue"  # of Kueue before 0.15


@pytest.mark.parametrize(
    ("served", "folder"),
    [((CRDS[0],), "kueue"), ((OLDER, CRDS[0]), "kueue"), ((OLDER,), "kueue-v1beta1")],
    ids=["newer", "both", "older"],
)
def test_the_queue_is_that_of_the_overlay(served, folder):
    options = ("--set", "kueue.enabled=true", "--set", r"quota.hard.requests\.nvidia\.com/gpu=null")
    chart, overlay = _by_name(_template(*options, crds=served)), _by_name(_kustomized(f"overlays/{folder}"))
    asked = ("--set", f"kueue.apiVersion={served[-1].split('/')[1]}")
    assert _by_name(_template(*options, *asked, crds=())) == chart
    assert overlay.pop(("Namespace", "mlpipe"))
    for one in overlay.values():
        one.pop("description", None)
    assert chart == overlay


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_the_queue_fits_the_crds_of_kueue(version):
    kinds = {
        "ResourceFlavor": "resourceflavors",
        "ClusterQueue": "clusterqueues",
        "LocalQueue": "localqueues",
        "WorkloadPriorityClass": "workloadpriorityclasses",
    }
    options = ("--values", CHART / "ci" / "full-values.yaml", "--set", f"kueue.apiVersion={version}")
    objects = list(manifests.load(_template(*options)))
    found = [one for one in objects if one["apiVersion"] == f"kueue.x-k8s.io/{version}"]
    assert {one["kind"] for one in found} == set(kinds)
    for one in found:
        validator = manifests.kueue_validator(kinds[one["kind"]], version)
        validator.validate(one)
        assert not validator.is_valid({**one, "nonsense": 1})


@pytest.mark.parametrize(
    ("kind", "plural"), [("PodMonitor", "podmonitors"), ("PrometheusRule", "prometheusrules")]
)
def test_what_prometheus_is_told_fits_the_crds_of_its_operator(kind, plural):
    objects = manifests.load(_template("--values", CHART / "ci" / "monitoring-values.yaml"))
    (found,) = [one for one in objects if one["kind"] == kind]
    validator = manifests.operator_validator(plural)
    validator.validate(found)
    assert not validator.is_valid({**found, "nonsense": 1})


@pytest.mark.parametrize(("flag", "overlay"), [("nodeEvents", "node-events"), ("capacity", "capacity")])
def test_cluster_wide_rights_are_those_of_the_overlay(flag, overlay):
    chart = _by_name(_template("--set", f"{flag}.enabled=true"))
    for one in _by_name(_kustomized(f"overlays/{overlay}")).values():
        assert chart[one["kind"], one["metadata"]["name"]] == one


def test_two_namespaces_share_no_cluster_wide_name():
    def cluster_wide(*options: str) -> set[tuple[str, str]]:
        switches = ",".join(f"{key}.enabled=true" for key in ("nodeEvents", "capacity", "guardrails"))
        flags = f"{switches},guardrails.images={{r.example.com/team}}"
        text = _template("--set", flags, *options)
        return {name for name, one in _by_name(text).items() if "namespace" not in one["metadata"]}

    assert cluster_wide()
    assert not cluster_wide() & cluster_wide("--set", "namespace.name=other")


@pytest.mark.parametrize(
    ("flag", "crd"),
    [("kueue.enabled", CRDS[0]), ("podMonitor.enabled", CRDS[1]), ("prometheusRule.enabled", CRDS[2])],
    ids=["kueue", "podMonitor", "prometheusRule"],
)
def test_a_flag_without_its_crd_says_so(flag, crd):
    message = _refused("--set", f"{flag}=true", crds=tuple({*CRDS} - {crd}))
    assert f"{flag} is true, but this cluster has no {crd}" in message
    assert f"set {flag}=false" in message
    assert crd in _template_kinds("--set", f"{flag}=true")


def _template_kinds(*options: str) -> set[str]:
    return {f"{one['apiVersion']}/{one['kind']}" for one in manifests.load(_template(*options))}


def test_flavors_with_different_resources_are_refused():
    flavors = [{"name": "a", "quota": {"cpu": "1"}}, {"name": "b", "quota": {"memory": "1Gi"}}]
    message = _refused(
        "--set", "kueue.enabled=true", "--set-json", f"kueue.flavors={json.dumps(flavors)}", crds=CRDS
    )
    assert "b lists other resources than a" in message


def test_the_releases_own_namespace_is_not_made_by_the_chart():
    assert "kubectl label namespace" in _refused("--set", "namespace.create=true")


def test_uninstalling_the_chart_leaves_the_namespace_and_what_runs_in_it():
    (one,) = manifests.load(
        _template(
            "--set", "namespace.create=true,namespace.name=x", "--show-only", "templates/namespace.yaml"
        )
    )
    assert one["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_helm_refuses_a_misspelt_key():
    assert "prometheusNamspace" in _refused("--set", "networkPolicy.prometheusNamspace=x")


def _objects(schema: dict, path: tuple[str, ...] = ()):
    """(path, schema) of every object with named keys in the schema, references followed."""
    if ref := schema.get("$ref"):
        schema = SCHEMA["definitions"][ref.rpartition("/")[2]]
    if "properties" in schema:
        yield path, schema
    for key, inner in schema.get("properties", {}).items():
        yield from _objects(inner, (*path, key))
    if isinstance(schema.get("items"), dict):
        yield from _objects(schema["items"], (*path, "0"))


def test_the_schema_is_closed_and_names_what_values_names():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.validate(VALUES, SCHEMA)
    for path, schema in _objects(SCHEMA):
        assert schema["additionalProperties"] is False, path
        value = VALUES
        for step in path:
            value = value[int(step) if step.isdigit() else step] if value else None
        if isinstance(value, dict):
            assert set(schema["properties"]) - {"global"} == set(value), path
    for name, definition in [*SCHEMA["definitions"].items(), *SCHEMA["properties"].items()]:
        if definition.get("type") == "object" and name != "global":
            assert "additionalProperties" in definition, name


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("metrics.ranksPerPod", "8"),
        ("metrics.ranksPerPod", 0),
        ("quota.hard.pods", "many"),
        ("namespace.name", "Not_A_Name"),
        ("namespace.podSecurity", "none"),
        ("podMonitor.interval", "soon"),
        ("networkPolicy.egress.cidrs", ["everywhere"]),
        ("networkPolicy.egress.ports", [70000]),
        ("networkPolicy.apiServerPorts", [80]),
        ("submitter.subjects", [{"kind": "Robot", "name": "x"}]),
        ("kueue.flavors", []),
        ("commonLabels", {"app.kubernetes.io/name": "other"}),
        ("podMonitor.labels", {"helm.sh/chart": "other"}),
        ("guardrails.images", ["registry.example.com/team/"]),
        ("guardrails.actions", ["Refuse"]),
        ("runbooks.baseUrl", "wiki/runbooks"),
        ("runbooks.baseUrl", 'https://wiki.example.com/"'),
    ],
)
def test_the_schema_refuses(path, value):
    values = copy.deepcopy(VALUES)
    *folders, last = path.split(".")
    inner = values
    for folder in folders:
        inner = inner[folder]
    inner[last] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA)


def test_ranks_are_scraped_and_let_through_alike():
    chart = _by_name(_template("--set", "podMonitor.enabled=true,metrics.ranksPerPod=3"))
    scraped = [end["port"] for end in chart["PodMonitor", "mlpipe"]["spec"]["podMetricsEndpoints"]]
    _, prometheus = chart["NetworkPolicy", "mlpipe"]["spec"]["ingress"]
    assert scraped == [port["port"] for port in prometheus["ports"]] == ["metrics", "metrics-1", "metrics-2"]


# where clouds hand out a node's identity, and all that only a node's own link should see
FORBIDDEN = [
    *map(ip_network, ("169.254.0.0/16", "100.100.100.200/32", "fe80::/10", "fd00:ec2::254", "fd20:ce::254"))
]


def _blocks(objects):
    """(range, exceptions) of every ipBlock of every policy."""
    policies = [one for one in objects if one["kind"] == "NetworkPolicy"]
    rules = [rule for one in policies for rule in one["spec"].get("egress", ())]
    for block in (peer["ipBlock"] for rule in rules for peer in rule.get("to", ()) if "ipBlock" in peer):
        yield ip_network(block["cidr"]), [*map(ip_network, block.get("except", ()))]


@pytest.mark.parametrize(
    "ranges",
    [
        ["0.0.0.0/1", "128.0.0.0/1", "0.0.0.0/0", "169.0.0.0/8", "169.254.0.0/15", "100.100.100.0/24"],
        ["::/0", "::/1", "8000::/1", "fd00::/8", "fe00::/7", "fd00:ec2::/32", "fd20:ce::250/124"],
        [
            "10.0.0.0/8",
            "169.255.0.0/16",
            "169.253.0.0/16",
            "100.100.100.201/32",
            "2001:db8::/32",
            "fec0::/10",
        ],
    ],
    ids=["IPv4", "IPv6", "nothing in them"],
)
def test_every_range_leaves_out_link_local_addresses_and_metadata_services(ranges):
    text = _template("--set", f"networkPolicy.egress.cidrs={{{','.join(ranges)}}}")
    found = list(_blocks(manifests.load(text)))
    assert [str(own) for own, _ in found] == ranges
    for own, excepted in found:
        # the API server wants each to be a part of the range
        inside = [one for one in FORBIDDEN if one.version == own.version and one.overlaps(own)]
        assert excepted == inside
        assert all(one != own and one.subnet_of(own) for one in excepted)


def test_no_shipped_range_holds_a_metadata_service():
    folders = ("base", "overlays/development", "overlays/kueue", "jenkins")
    found = [block for name in folders for block in _blocks(manifests.load(_kustomized(name)))]
    assert len(found) > 6
    for own, excepted in found:
        assert {one for one in FORBIDDEN if one.version == own.version and one.overlaps(own)} <= {*excepted}


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("networkPolicy.egress.cidrs={169.254.169.254/32}", "169.254.169.254/32 lies in 169.254.0.0/16"),
        ("networkPolicy.egress.cidrs={0.0.0.0/0,fe80::/64}", "fe80::/64 lies in fe80::/10"),
        ("networkPolicy.egress.cidrs={1.2.3/8}", "1.2.3/8 is no range of addresses"),
        ("networkPolicy.egress.cidrs={1.2.3.300/8}", "1.2.3.300/8 is no range of addresses"),
        ("networkPolicy.egress.cidrs={1.2.3.4/33}", "1.2.3.4/33 is no range of addresses"),
        ("driver.serviceAccount.name=mlpipe-worker", "are both mlpipe-worker"),
        ("guardrails.enabled=true", "say where images may come from"),
    ],
)
def test_what_would_open_a_door_is_refused(option, words):
    assert words in _refused("--set", option)


@pytest.mark.parametrize("name", ["base", "overlays/kueue"])
def test_a_pod_without_labels_has_no_network(name):
    """Every policy that allows something selects by labels that no patch can take or give."""
    policies = [one for one in manifests.load(_kustomized(name)) if one["kind"] == "NetworkPolicy"]
    (default,) = [one["spec"] for one in policies if not one["spec"]["podSelector"]]
    assert default == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    for one in policies:
        rules = one["spec"].get("ingress", []) + one["spec"].get("egress", [])
        chosen = one["spec"]["podSelector"].get("matchLabels", {})
        assert bool(rules) == bool(chosen)
        assert all(re.fullmatch(SELECTED, key) for key in chosen)


def test_the_exporter_is_scraped_like_a_rank_and_needs_to_know_what_it_serves():
    assert "exporter.image, exporter.store" in _refused("--set", "exporter.enabled=true")
    known = (
        "exporter.enabled=true,exporter.image=r.example.com/mlpipe@sha256:0,exporter.store=s3://ml-runs/llm"
    )
    chart = _by_name(_template("--set", f"{known},podMonitor.enabled=true"))
    template = chart["Deployment", "mlpipe-exporter"]["spec"]["template"]
    monitor = chart["PodMonitor", "mlpipe"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (port,) = template["spec"]["containers"][0]["ports"]
    assert port["name"] == monitor["podMetricsEndpoints"][0]["port"]
    allowed = chart["NetworkPolicy", "mlpipe"]["spec"]["podSelector"]["matchLabels"]
    assert allowed.items() <= template["metadata"]["labels"].items()


def test_boards_and_rules_are_those_of_the_repository_and_off_unless_asked_for():
    kinds = _template_kinds()
    assert "monitoring.coreos.com/v1/PrometheusRule" not in kinds
    chart = _by_name(_template("--set", "prometheusRule.enabled=true,dashboards.enabled=true"))
    rules = yaml.safe_load((ROOT / "grafana" / "rules" / "mlpipe.yaml").read_text())
    assert chart["PrometheusRule", "mlpipe"]["spec"] == rules
    for path in (ROOT / "grafana" / "dashboards").glob("*.json"):
        board = chart["ConfigMap", f"mlpipe-dashboard-{path.stem}"]
        (text,) = board["data"].values()
        assert json.loads(text) == json.loads(path.read_text())
        assert len(text) < 1_000_000, "a ConfigMap holds one MiB"


def test_boards_go_where_the_sidecar_looks_and_runbooks_where_people_read_them():
    objects = manifests.load(_template("--values", CHART / "ci" / "monitoring-values.yaml"))
    found = [one for one in objects if one["kind"] in ("ConfigMap", "PrometheusRule")]
    assert len(found) == 4
    for one in found:
        text = json.dumps(one)
        assert "docs/runbooks/" not in text
        assert "https://wiki.example.com/mlpipe/runbooks/Mlpipe" in text
        if one["kind"] == "ConfigMap":
            assert one["metadata"]["labels"]["grafana_dashboard"] == "1"
            assert one["metadata"]["namespace"] == "observability"


def test_what_mlpipe_renders_is_what_the_chart_selects():
    pipeline = load_pipeline(ROOT / "pipelines" / "llm.yaml")
    hardware = Hardware("cuda", 2, 8, 80 * GIB, "H100-80GB", {"bf16": 989e12}, 96)
    plan = build_plan(pipeline, "train", Start("r", 1, pipeline.store), hardware)
    (job,) = [one for one in stage_objects(plan) if one["kind"] == "JobSet"]
    template = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    ports = [port["name"] for port in template["spec"]["containers"][0]["ports"]]
    chart = _by_name(_template("--set", "podMonitor.enabled=true"))
    monitor = chart["PodMonitor", "mlpipe"]["spec"]
    assert [end["port"] for end in monitor["podMetricsEndpoints"]] == ports
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert all(re.fullmatch(SELECTED, key) for key in monitor["selector"]["matchLabels"])
    for name, component in (("mlpipe", "worker"), ("mlpipe", "driver"), ("mlpipe-driver", "driver")):
        chosen = chart["NetworkPolicy", name]["spec"]["podSelector"]["matchLabels"]
        assert chosen.items() <= labels("r", None, None, component).items()
    assert template["spec"]["serviceAccountName"] == VALUES["worker"]["serviceAccount"]["name"]


def test_notes_say_what_is_left_to_do():
    def notes(*options: str) -> str:
        done = helm("install", "mlpipe", CHART, "--dry-run=client", "--namespace", "mlpipe", *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.partition("NOTES:")[2]

    text = notes()
    assert "pod-security.kubernetes.io/enforce=restricted" in text
    assert "--role=mlpipe-submitter" in text
    assert "set-context --current --namespace=mlpipe\n" in text
    assert "This cluster has no JobSet" in text
    assert "mlpipe-submitter" not in notes("--values", str(CHART / "ci" / "minimal-values.yaml"))


def test_the_version_is_that_of_mlpipe():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'__version__ = "(.+)"', (ROOT / "src/mlpipe/__init__.py").read_text())
    assert version is not None
    assert chart["appVersion"] == version[1]


def test_large_whole_numbers_are_written_out():
    """Helm reads them as floats, of which `quote` makes 1.2e+06."""
    values = {
        "quota.hard.pods": 1200000,
        "limitRange.default.memory": 4294967296,
        "kueue": {
            "enabled": True,
            "name": "q",
            "flavors": [{"name": "a", "quota": {"cpu": 12345678}}],
            "priorities": {"huge": 1000000},
        },
    }
    options = [f"--set-json={key}={json.dumps(value)}" for key, value in values.items()]
    text = _template(*options)
    assert [line for line in text.splitlines() if re.search(r"\de\+\d", line)] == []
    for value in (
        '"pods": "1200000"',
        '"memory": "4294967296"',
        'nominalQuota: "12345678"',
        "value: 1000000",
    ):
        assert value in text
