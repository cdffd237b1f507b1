"""k8s/jenkins/: objects fit their schemas, agents are restricted, and nothing of a change request comes near
a token or a credential. Jenkins' own files (JCasC, Job DSL, plugins) are checked against each other and the
plugins' sources as cited; no Jenkins has read them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.manifests import check_schema, load

pytestmark = pytest.mark.unit
K8S = Path(__file__).resolve().parents[2] / "k8s"


# DataBoundSetters of jenkinsci/kubernetes-plugin, KubernetesCloud.java and PodTemplate.java, 2026-03-25
CLOUD = {"name", "serverUrl", "credentialsId", "namespace", "jenkinsUrl", "webSocket", "usageRestricted",
         "containerCapStr", "templates"}  # fmt: skip
TEMPLATE = {"name", "label", "nodeUsageMode", "agentContainer", "agentInjection", "yamlMergeStrategy", "yaml"}


def jcasc() -> dict[str, Any]:
    (found,) = load((K8S / "jenkins/jcasc.yaml").read_text())
    return found


def test_every_object_fits_its_schema() -> None:
    for name in ("agent.yaml", "agent-check.yaml", "serviceaccount.yaml", "rbac.yaml"):
        for found in load((K8S / "jenkins" / name).read_text()):
            check_schema(found)


def test_the_agent_of_change_requests_has_nothing() -> None:
    (agent,) = load((K8S / "jenkins/agent.yaml").read_text())
    (check,) = load((K8S / "jenkins/agent-check.yaml").read_text())
    del agent["spec"]["containers"][0]["env"], agent["spec"]["serviceAccountName"]
    agent["spec"]["automountServiceAccountToken"] = False
    agent["metadata"]["labels"]["app.kubernetes.io/name"] = "mlpipe-check"
    assert check == agent


def test_each_cloud_has_its_own_token_and_namespace() -> None:
    clouds = {one["kubernetes"]["name"]: one["kubernetes"] for one in jcasc()["jenkins"]["clouds"]}
    assert {name: (one["namespace"], one["credentialsId"]) for name, one in clouds.items()} == {
        "runs": ("mlpipe", "runs"),
        "checks": ("mlpipe-checks", "checks"),
    }
    for cloud, file in (("runs", "agent.yaml"), ("checks", "agent-check.yaml")):
        assert set(clouds[cloud]) == CLOUD
        assert clouds[cloud]["usageRestricted"] is True
        (template,) = clouds[cloud]["templates"]
        assert set(template) == TEMPLATE
        (pod,) = load((K8S / "jenkins" / file).read_text())
        assert yaml.safe_load(template["yaml"]) == pod
    (stored,) = jcasc()["credentials"]["system"]["domainCredentials"]
    assert {one["string"]["scope"] for one in stored["credentials"]} == {"SYSTEM"}  # for no job
    bound = {
        (one["metadata"]["namespace"], one["subjects"][0]["name"])
        for one in load((K8S / "jenkins/rbac.yaml").read_text())
        if one["kind"] == "RoleBinding"
    }
    assert bound == {("mlpipe", "jenkins-runs"), ("mlpipe-checks", "jenkins-checks")}


def test_only_the_folder_of_protected_branches_has_credentials_and_runs() -> None:
    (job,) = jcasc()["jobs"]
    protected, requests = re.split(r"^folder\('mlpipe-checks'\)", job["script"], flags=re.M)
    assert re.findall(r"string\('(.*)'\)", protected) == ["runs", "checks"]
    assert re.findall(r"string\('(.*)'\)", requests) == ["checks"]
    assert "gitHubTrustNobody()" in requests
    assert "gitHubBranchDiscovery" not in requests
    assert "redentials" not in requests
    assert not re.search("PullRequest|ForkDisc", protected)


def test_secrets_come_from_the_secrets_that_the_chart_mounts() -> None:
    values = yaml.safe_load((K8S / "jenkins/values.yaml").read_text())["controller"]
    mounted = {f"{one['name']}-{one['keyName']}" for one in values["additionalExistingSecrets"]}
    text = (K8S / "jenkins/jcasc.yaml").read_text()
    assert set(re.findall(r"\$\{?([^}]*)\}?", text)) == mounted


def test_plugins_are_pinned_once() -> None:
    lines = (K8S / "jenkins/plugins.txt").read_text().splitlines()
    plugins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+:[0-9][0-9a-z._-]*", line) for line in plugins)
    values = yaml.safe_load((K8S / "jenkins/values.yaml").read_text())["controller"]
    assert values["installPlugins"] == plugins
    assert values["installLatestPlugins"] is False


def test_the_agent_is_restricted() -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/"""
    spec = yaml.safe_load((K8S / "jenkins/agent.yaml").read_text())["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["name"] == "mlpipe"
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert "@sha256:" in container["image"]
    assert not any("gpu" in name for name in container["resources"]["limits"])  # it never trains
    assert all("value" not in variable for variable in container["env"])


def test_its_account_may_do_what_a_submitter_may() -> None:
    account, binding = load((K8S / "jenkins/serviceaccount.yaml").read_text())
    assert account["metadata"]["name"] == binding["subjects"][0]["name"] == "mlpipe-agent"
    (role,) = load((K8S / "base/submitter.yaml").read_text())
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
