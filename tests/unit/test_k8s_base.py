"""k8s/: every overlay builds, fits the schemas of three Kubernetes minors, and gives no right too many."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from kit.manifests import check_schema

pytestmark = pytest.mark.unit
K8S = Path(__file__).resolve().parents[2] / "k8s"
GUIDE = K8S.parent / "docs" / "how-to" / "cluster-setup.md"
BUILDS = ["base", *(f"overlays/{path.name}" for path in sorted(K8S.glob("overlays/*")))]

# The whole of what the design allows the driver; a right more is a decision, not an edit.
READS = {"get", "list", "watch"}
RUNS = READS | {"create", "delete"}
OWNED = {"get", "list", "create", "patch", "delete"}
DRIVER = {
    "batch/jobs": RUNS | {"patch"},
    "jobset.x-k8s.io/jobsets": RUNS | {"patch"},
    "trainer.kubeflow.org/trainjobs": RUNS | {"patch"},
    "scheduling.volcano.sh/podgroups": OWNED,
    "resource.k8s.io/resourceclaimtemplates": OWNED,
    "/services": OWNED,
    "/configmaps": OWNED,
    "/pods": READS | {"delete"},
    "/pods/log": {"get"},
    "/events": READS,
    "/resourcequotas": READS,
    "/persistentvolumeclaims": READS,
    "kueue.x-k8s.io/workloads": READS,
}


@pytest.fixture(scope="module")
def built():
    """name of a build -> its objects"""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not on PATH: it builds k8s/. Install kubectl")
    objects = {}
    for name in BUILDS:
        done = subprocess.run(
            ["kubectl", "kustomize", K8S / name], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Warning" not in done.stderr, done.stderr
        objects[name] = list(yaml.safe_load_all(done.stdout))
    return objects


def _of(objects, kind):
    return {one["metadata"]["name"]: one for one in objects if one["kind"] == kind}


def _rights(role):
    """resource -> verbs"""
    return {
        f"{group}/{resource}": set(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


@pytest.mark.parametrize("name", BUILDS)
def test_fits_the_schemas(built, name):
    for one in built[name]:
        check_schema(one)


def test_the_schemas_would_refuse_a_misspelt_key(built):
    account = _of(built["base"], "ServiceAccount")["mlpipe-worker"]
    with pytest.raises(Exception, match="automountServiceAcountToken"):
        check_schema({**account, "automountServiceAcountToken": False})


@pytest.mark.parametrize("name", BUILDS)
def test_no_wildcard_secret_or_exec(built, name):
    for one in built[name]:
        for rule in one.get("rules", ()):
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "pods/exec", "pods/attach", "pods/portforward"} & set(rule["resources"])
            assert not {"bind", "escalate", "impersonate", "deletecollection"} & set(rule["verbs"])


def test_the_driver_may_do_exactly_this(built):
    assert _rights(_of(built["base"], "Role")["mlpipe-driver"]) == DRIVER


def test_the_guide_tells_every_right():
    rows = re.findall(r"^\| (`.+`.*) \| (get.*?) \|", GUIDE.read_text(), flags=re.M)
    told = {name: set(verbs.split(", ")) for names, verbs in rows for name in re.findall(r"`(\S+)`", names)}
    assert told == {resource.partition("/")[2]: verbs for resource, verbs in DRIVER.items()}


def test_who_submits_may_do_nothing_that_the_driver_may_not(built):
    for resource, verbs in _rights(_of(built["base"], "Role")["mlpipe-submitter"]).items():
        dry_run = {"create"} if resource == "/pods" else set()  # who may create Jobs may make pods anyhow
        assert verbs <= DRIVER[resource] | dry_run, resource


def test_who_submits_may_have_all_checked_that_the_driver_creates(built):
    rights = _rights(_of(built["base"], "Role")["mlpipe-submitter"])
    created = {resource for resource, verbs in DRIVER.items() if "create" in verbs}
    assert {resource for resource in created if "create" not in rights.get(resource, set())} == set()


def test_no_account_mounts_its_token(built):
    accounts = _of(built["base"], "ServiceAccount")
    assert set(accounts) == {"mlpipe-driver", "mlpipe-worker"}
    assert [one for one in accounts.values() if one["automountServiceAccountToken"] is not False] == []


def test_the_worker_has_no_rights(built):
    for objects in built.values():
        bound = [one for kind in ("RoleBinding", "ClusterRoleBinding") for one in _of(objects, kind).values()]
        assert "mlpipe-worker" not in [who["name"] for one in bound for who in one["subjects"]]


@pytest.mark.parametrize(
    ("name", "namespace"),
    [("base", "mlpipe"), ("overlays/kueue", "mlpipe"), ("overlays/development", "mlpipe-dev")],
)
def test_everything_lies_in_one_restricted_namespace(built, name, namespace):
    labels = _of(built[name], "Namespace")[namespace]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    assert {one["metadata"].get("namespace", namespace) for one in built[name]} == {namespace}
    for binding in _of(built[name], "RoleBinding").values():
        assert {who.get("namespace", namespace) for who in binding["subjects"]} == {namespace}


def test_node_events_are_read_in_one_namespace_alone(built):
    objects = built["overlays/node-events"]
    assert sorted(one["kind"] for one in objects) == ["ClusterRole", "RoleBinding"]
    assert _rights(_of(objects, "ClusterRole")["mlpipe-node-events"]) == {"/events": READS}
    assert _of(objects, "RoleBinding")["mlpipe-node-events"]["metadata"]["namespace"] == "default"


def test_the_queue_hands_out_gpus_and_the_quota_does_not(built):
    assert "requests.nvidia.com/gpu" in _of(built["base"], "ResourceQuota")["mlpipe"]["spec"]["hard"]
    hard = _of(built["overlays/kueue"], "ResourceQuota")["mlpipe"]["spec"]["hard"]
    assert "requests.nvidia.com/gpu" not in hard
    (group,) = _of(built["overlays/kueue"], "ClusterQueue")["mlpipe"]["spec"]["resourceGroups"]
    assert "nvidia.com/gpu" in group["coveredResources"]
    for flavor in group["flavors"]:  # Kueue wants the same resources in the same order
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]
