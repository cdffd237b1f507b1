"""k8s/: every overlay builds, fits the schemas of three Kubernetes minors, and gives no right too many."""

from __future__ import annotations

import ast
import collections
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from kit.manifests import check_schema

from mlpipe.submit.kubernetes import api, multikueue
from mlpipe.submit.kubernetes.objects import GANGS

pytestmark = pytest.mark.unit
K8S = Path(__file__).resolve().parents[2] / "k8s"
GUIDE = K8S.parent / "docs" / "how-to" / "cluster-setup.md"
BUILDS = ["base", *(f"overlays/{path.name}" for path in sorted(K8S.glob("overlays/*")))]

# The whole of what the design allows the driver; a right more is a decision, not an edit.
OWNED = {"get", "create", "patch", "delete"}
RUNS = OWNED | {"list", "watch"}
DRIVER = {
    "batch/jobs": RUNS,
    "jobset.x-k8s.io/jobsets": RUNS,
    "trainer.kubeflow.org/trainjobs": RUNS,
    "scheduling.volcano.sh/podgroups": OWNED,
    "resource.k8s.io/resourceclaimtemplates": OWNED,
    "/services": OWNED,
    "/configmaps": OWNED,
    "/pods": {"get", "list", "watch", "delete"},
    "/events": {"list"},
    "kueue.x-k8s.io/workloads": {"list"},
}
# What only who submits does, and what only some other verb does.
SUBMITTER_ALONE = {
    "/pods": {"create"},  # a dry run: who may create Jobs may make pods anyhow
    "/configmaps": {"get"},
    "/persistentvolumeclaims": {"get"},
    "kueue.x-k8s.io/localqueues": {"get"},
    "/namespaces": {"get"},
    "/serviceaccounts": {"get"},
}
# Of no call of ours: for `kubectl describe` and `kubectl logs` of people, who may list all that they get.
BY_HAND = {"/pods/log": {"get"}, "/events": {"get"}, "kueue.x-k8s.io/workloads": {"get"}}
CAPACITY = {
    "/nodes": {"list"},
    "/pods": {"list"},
    "kueue.x-k8s.io/clusterqueues": {"get"},
    "kueue.x-k8s.io/admissionchecks": {"get"},
    "kueue.x-k8s.io/multikueueconfigs": {"get"},
}

KUBERNETES = K8S.parent / "src" / "mlpipe" / "submit" / "kubernetes"
CALLS = {
    "get": {"get"},
    "list": {"list"},
    "snapshot": {"list"},
    "watch": {"watch"},
    "create": {"create"},
    "create_or_adopt": {"create", "get"},
    "patch": {"patch"},
    "delete": {"delete"},
}
MADE = (*GANGS, "PodGroup", "ResourceClaimTemplate", "Service", "ConfigMap")  # of a stage, by the renderer
# Of calls whose kind is no literal: which ones it may be.
KINDS_OF = {
    ("driver_job.py", "get"): {"Job"},
    ("driver_job.py", "delete"): {"Job"},
    ("driver_job.py", "create_or_adopt"): {"Job"},
    ("gang.py", "delete"): set(GANGS),
    ("objects.py", "create"): {*MADE, "Pod"},
    ("objects.py", "create_or_adopt"): set(MADE),
    ("objects.py", "delete"): set(MADE),
    ("objects.py", "get"): set(MADE),
    ("objects.py", "list"): set(GANGS),
    ("objects.py", "patch"): set(MADE),
    ("pending.py", "list"): set(GANGS),
    ("placement.py", "list"): set(GANGS),
    ("placement.py", "patch"): set(GANGS),
    ("watch.py", "snapshot"): {*GANGS, "Pod"},
    ("watch.py", "watch"): {*GANGS, "Pod"},
}


def _called():
    """resource -> verbs, of all requests that mlpipe's sources make to a cluster; and the calls of kinds that
    are no literal."""
    rights = collections.defaultdict(set)
    variable = set()
    for path in sorted(KUBERNETES.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            whose, name = ast.unparse(node.func.value), node.func.attr
            if path.name == "api.py" or whose not in ("api", "self._api") or name not in CALLS:
                continue
            kinds = {node.args[0].value} if isinstance(node.args[0], ast.Constant) else None
            if kinds is None:
                variable.add((path.name, name))
                kinds = KINDS_OF.get((path.name, name), set())
            for kind in kinds:
                prefix, plural = api._KINDS[kind]
                group = prefix.split("/")[2] if prefix.startswith("/apis/") else ""
                rights[f"{group}/{plural}"] |= CALLS[name]
    return rights, variable


# Of paths that are written out, the resource is the last word that is none of these or of a version.
PATHS = {
    "nodes": ("/nodes", "list"),
    "pods": ("/pods", "list"),
    "events": ("/events", "list"),
    "localqueues": ("kueue.x-k8s.io/localqueues", "get"),
    "clusterqueues": ("kueue.x-k8s.io/clusterqueues", "get"),
    "admissionchecks": ("kueue.x-k8s.io/admissionchecks", "get"),
    "multikueueconfigs": ("kueue.x-k8s.io/multikueueconfigs", "get"),
    "serviceaccounts": ("/serviceaccounts", "get"),
    "namespaces": ("/namespaces", "get"),
}
# Discovery, and what a server lets everybody ask of himself.
OF_ALL = {"apis", "api", "kueue.x-k8s.io", "jobset.x-k8s.io", "authorization.k8s.io", "version"}
OF_ALL |= {"selfsubjectaccessreviews", "default", "v1", "v1alpha2"}


def _paths_called():
    """resource -> verbs, by the paths that are written out in mlpipe's sources."""
    words = set()
    for path in KUBERNETES.glob("*.py"):
        if path.name == "api.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            is_text = isinstance(node, ast.JoinedStr | ast.Constant)
            if is_text and re.match(
                r"""f?['\"](/apis?/|/version|\{kueue\}/|\{core\}/)""", text := ast.unparse(node)
            ):
                words |= set(re.findall(r"/([a-z0-9.-]+)", re.sub(r"\{[^}]*\}", "_", text)))
    rights = collections.defaultdict(set)
    for word in words - OF_ALL:
        resource, verb = PATHS[word]
        rights[resource] |= {verb}
    return rights


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
    rows = re.findall(r"^\| (`.+`.*) \| ((?:get|list).*?) \|", GUIDE.read_text(), flags=re.M)
    told = {name: set(verbs.split(", ")) for names, verbs in rows for name in re.findall(r"`(\S+)`", names)}
    assert told == {resource.partition("/")[2]: verbs for resource, verbs in DRIVER.items()}


def _joined(*rights):
    resources = sorted({resource for one in rights for resource in one})
    return {name: set().union(*(one.get(name, set()) for one in rights)) for name in resources}


def test_who_submits_may_do_little_that_the_driver_may_not(built):
    rights = _rights(_of(built["base"], "Role")["mlpipe-submitter"])
    allowed = _joined(DRIVER, SUBMITTER_ALONE, BY_HAND)
    assert {name: verbs - allowed[name] for name, verbs in rights.items() if verbs - allowed[name]} == {}
    assert {verb for verbs in rights.values() for verb in verbs} == {"get", "list", "create", "delete"}
    for name, verbs in _joined(SUBMITTER_ALONE, BY_HAND).items():
        assert verbs <= rights[name], name


def test_each_call_of_mlpipe_has_a_right_and_each_right_a_call():
    called, variable = _called()
    assert variable == set(KINDS_OF), "say of which kinds it is"
    # of volumes and variables, which are looked for in the clusters that MultiKueue chooses from
    named = {f"/{kind.lower()}s": {"get"} for kind, _ in multikueue._OF_VOLUMES.values() if kind != "Secret"}
    assert _joined(called, _paths_called(), named) == _joined(DRIVER, SUBMITTER_ALONE, CAPACITY)


def test_what_is_read_of_a_whole_cluster_is_bound_to_nobody(built):
    (role,) = built["overlays/capacity"]
    assert (role["kind"], _rights(role)) == ("ClusterRole", CAPACITY)


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
    assert _rights(_of(objects, "ClusterRole")["mlpipe-node-events"]) == {"/events": {"list"}}
    assert _of(objects, "RoleBinding")["mlpipe-node-events"]["metadata"]["namespace"] == "default"


def test_the_queue_hands_out_gpus_and_the_quota_does_not(built):
    assert "requests.nvidia.com/gpu" in _of(built["base"], "ResourceQuota")["mlpipe"]["spec"]["hard"]
    hard = _of(built["overlays/kueue"], "ResourceQuota")["mlpipe"]["spec"]["hard"]
    assert "requests.nvidia.com/gpu" not in hard
    (group,) = _of(built["overlays/kueue"], "ClusterQueue")["mlpipe"]["spec"]["resourceGroups"]
    assert "nvidia.com/gpu" in group["coveredResources"]
    for flavor in group["flavors"]:  # Kueue wants the same resources in the same order
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]
