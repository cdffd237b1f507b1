"""Controllers beside the test cluster's own: they run outside pods, so their webhooks are called by URL."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kit.cluster_build import binary, manifests
from kit.cluster_control import ControlPlane
from kit.cluster_process import Namespaces, Process, wait_until

Kubectl = Callable[[list[str], str | None], str]  # arguments, standard input -> output
_READY_SECONDS = 60
_JOBSET_PODS = {"matchExpressions": [{"key": "jobset.sigs.k8s.io/jobset-name", "operator": "Exists"}]}


def start_jobset(folder: Path, control: ControlPlane, namespaces: Namespaces, kubectl: Kubectl) -> Process:
    """The JobSet controller with its CRD and webhooks, ready."""
    folder.mkdir()
    source = manifests("jobset") / "config/components"
    _create_crds(source / "crd/bases", control, kubectl)
    serving = folder / "k8s-webhook-server" / "serving-certs"  # below TMPDIR: not to be configured
    serving.mkdir(parents=True)
    _serve(control, serving, "jobset")
    config = {
        "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": 9443},
        "health": {"healthProbeBindAddress": "127.0.0.1:8081"},
        "metrics": {"bindAddress": "127.0.0.1:8443"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    process = Process(
        "jobset",
        namespaces.network([binary("jobset"), f"--config={folder / 'config.json'}"]),
        folder / "jobset.log",
        env={"KUBECONFIG": str(control.kubeconfig), "TMPDIR": str(folder)},
    ).start()
    _wait_until_answers("the JobSet controller", "http://127.0.0.1:8081/readyz", process, namespaces)
    hooks = webhooks(source / "webhook/manifests.yaml", "jobset", 9443, control.certificates.ca)
    for hook in (hook for one in hooks for hook in one["webhooks"]):
        if hook["name"] in ("mpod.kb.io", "vpod.kb.io"):
            hook["objectSelector"] = _JOBSET_PODS  # as the module's own patches say
    kubectl(["create", "-f", "-"], json.dumps({"apiVersion": "v1", "kind": "List", "items": hooks}))
    return process


def webhooks(path: Path, name: str, port: int, ca: Path) -> list[dict[str, Any]]:
    """The module's webhook configurations, called at 127.0.0.1:`port`. Theirs all have the same names."""
    configurations: list[dict[str, Any]] = list(yaml.safe_load_all(path.read_text()))
    bundle = base64.b64encode(ca.read_bytes()).decode()
    for one in configurations:
        one["metadata"]["name"] = f"{name}-{one['metadata']['name']}"
        for hook in one["webhooks"]:
            url = f"https://127.0.0.1:{port}{hook['clientConfig']['service']['path']}"
            hook["clientConfig"] = {"url": url, "caBundle": bundle}
    return configurations


def _create_crds(folder: Path, control: ControlPlane, kubectl: Kubectl) -> None:
    """Creates all of the folder and waits until the API serves them."""
    kubectl(["create", "-f", str(folder)], None)
    names = [yaml.safe_load(path.read_text())["metadata"]["name"] for path in folder.glob("*.yaml")]

    def established() -> bool:
        # not `kubectl wait`: it fails on a resource so new that it has no conditions
        found = (
            control.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{n}")[1] for n in names
        )
        return all('"type":"Established","status":"True"' in body for body in found)

    wait_until(f"the resources {', '.join(names)}", established, _READY_SECONDS)


def _serve(control: ControlPlane, folder: Path, name: str) -> None:
    """Writes tls.crt and tls.key for a server on 127.0.0.1."""
    certificate, key = control.certificates.issue(f"{name}-webhook", f"/CN={name}", ["IP:127.0.0.1"])
    (folder / "tls.crt").write_bytes(certificate.read_bytes())
    (folder / "tls.key").write_bytes(key.read_bytes())


def _wait_until_answers(what: str, url: str, process: Process, namespaces: Namespaces) -> None:
    def answers() -> bool:
        with namespaces.inside(), urllib3.PoolManager(retries=False, timeout=2.0) as pool:
            try:
                return pool.request("GET", url).status == 200
            except urllib3.exceptions.HTTPError:
                return False  # not listening yet

    wait_until(what, answers, _READY_SECONDS, [process])
