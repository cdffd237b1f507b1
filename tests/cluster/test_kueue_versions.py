"""Kueue's API as it comes, changes its version and loses the old one, on a real API server: why a run waits
is told, and the shipped queue is taken, throughout. In test_submit_kueue.py a Kueue runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.cluster_objects import job, named, pod_template
from kit.cluster_process import wait_until
from kit.manifests import kueue_crds, load

from mlpipe.submit.kubernetes.api import connect
from mlpipe.submit.kubernetes.objects import selector
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]
OVERLAYS = Path(__file__).resolve().parents[2] / "k8s" / "overlays"
KINDS = ("clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses", "workloads")


def test_a_cluster_gets_kueue_and_upgrades_it(api_alone, monkeypatch):
    kubectl = api_alone.kubectl

    def install(version: str) -> None:
        paths = [kueue_crds(version) / f"kueue.x-k8s.io_{kind}.yaml" for kind in KINDS]
        kubectl("apply", "--server-side", *(word for path in paths for word in ("-f", path)))

        def served() -> bool:
            text = api_alone.ask(f"/apis/kueue.x-k8s.io/{version}")[1]
            return all(f'"name":"{kind}"' in text for kind in KINDS)

        wait_until(f"Kueue's {version}", served, 60)

    def said(version: str | None, overlay: str = "kueue") -> str:
        if version:
            objects = load(kubectl("kustomize", OVERLAYS / overlay))
            found = [one for one in objects if one["apiVersion"].startswith("kueue.")]
            items = {"apiVersion": "v1", "kind": "List", "items": found}
            kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(items))
        with api_alone.inside():
            api = connect(None, "waits")
            assert api.kueue_version() == version
            return why_pending(api, wanted)

    monkeypatch.setenv("KUBECONFIG", str(api_alone.kubeconfig))
    wanted = selector("r", "train", 1)
    labels = {**wanted, "kueue.x-k8s.io/queue-name": "team"}
    gang = job("gang", "waits", pod_template("x", ["x"]), suspend=True)
    gang["metadata"]["labels"] = labels
    kubectl("create", "namespace", "waits")
    kubectl("apply", "-f", OVERLAYS.parent / "base" / "namespace.yaml")
    kubectl("create", "-f", "-", stdin=json.dumps(gang))
    uid = kubectl("get", "job", "gang", "-n", "waits", "-o", "jsonpath={.metadata.uid}")
    assert "waits in the queue team, and this cluster has no Kueue" in said(None)

    install("v1beta1")
    workload = named("kueue.x-k8s.io/v1beta1", "Workload", "w", "waits")
    workload["metadata"]["labels"] = {"kueue.x-k8s.io/job-uid": uid}
    template = {"spec": pod_template("x", ["x"])["spec"]}
    workload["spec"] = {"queueName": "team", "podSets": [{"name": "main", "count": 1, "template": template}]}
    kubectl("create", "-f", "-", stdin=json.dumps(workload))
    condition = {"type": "QuotaReserved", "status": "False", "reason": "Pending"}
    condition |= {"message": "LocalQueue team doesn't exist", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    status = json.dumps({"status": {"conditions": [condition]}})
    kubectl("patch", "workload", "w", "-n", "waits", "--subresource=status", "--type=merge", "-p", status)
    told = (
        "Job gang is suspended: Kueue: LocalQueue team doesn't exist; make the LocalQueue, or correct "
        "kubernetes.queue"
    )
    assert said("v1beta1", "kueue-v1beta1") == told

    install("v1beta2")
    assert said("v1beta2") == told
    for kind in KINDS:  # as Kueue 0.20 does
        gone = json.dumps([{"op": "replace", "path": "/spec/versions/0/served", "value": False}])
        kubectl("patch", "crd", f"{kind}.kueue.x-k8s.io", "--type=json", "-p", gone)
    assert said("v1beta2") == told
