"""Kubernetes objects that tests of the cluster build on, as plain dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Object = dict[str, Any]


def named(version: str, kind: str, name: str, namespace: str | None = None, **rest: Any) -> Object:
    metadata = {"name": name, **({"namespace": namespace} if namespace else {})}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def pod_template(image: str, command: Sequence[str]) -> Object:
    """What a namespace that enforces `restricted` demands and a read-only root, with /tmp to write to."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": list(command),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    return {"metadata": {"labels": {"app": "test"}}, "spec": spec}


def job(name: str, namespace: str, pod: Object, *, num_pods: int = 1, **spec: Any) -> Object:
    """An Indexed Job whose pods all run at once and are never started again."""
    counts = {
        "completionMode": "Indexed",
        "completions": num_pods,
        "parallelism": num_pods,
        "backoffLimit": 0,
    }
    return named("batch/v1", "Job", name, namespace, spec={**counts, "template": pod, **spec})
