"""k8s/jenkins/: the agent's pod fits its schema and Pod Security's level restricted, and may only submit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from kit.manifests import check_schema, load

pytestmark = pytest.mark.unit
K8S = Path(__file__).resolve().parents[2] / "k8s"


def test_every_object_fits_its_schema() -> None:
    for name in ("agent.yaml", "serviceaccount.yaml"):
        for found in load((K8S / "jenkins" / name).read_text()):
            check_schema(found)


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
