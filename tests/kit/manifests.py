"""Kubernetes objects against the published schemas, strictly and offline."""

from __future__ import annotations

import importlib
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kit import cluster_build
from kit.servers import ServerMissingError

MINORS = ("1.35", "1.36", "1.37")
OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.85.0"
KUEUE = {"v1beta1": "v0.10.2", "v1beta2": cluster_build.PROGRAMS["kueue"].version}
# Kinds whose schema is in a CRD: see `crd_validator`, `operator_validator`. Go's module proxy does not have
# Volcano's module: our PodGroup was compared by hand with the CRD of commit ed72c7c81 (2026-08-20), and fits.
OF_CRDS = (
    "jobset.x-k8s.io/",
    "kueue.x-k8s.io/",
    "monitoring.coreos.com/",
    "scheduling.volcano.sh/",
    "trainer.kubeflow.org/",
)


class _Strict(yaml.CSafeLoader):
    """Refuses a key that stands twice in one mapping, as the YAML parser of a cluster's tools would."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            raise yaml.constructor.ConstructorError(None, None, f"a key twice in {keys}", node.start_mark)
        return super().construct_mapping(node, deep)


def load(text: str) -> Iterator[dict[str, Any]]:
    """The objects of a stream; empty documents are left out."""
    return filter(None, yaml.load_all(text, _Strict))


def check_schema(one: Mapping[str, Any]) -> None:
    """Raises when `one` does not fit its kind in one of MINORS, or has a key that the kind does not have."""
    if one["apiVersion"].startswith(OF_CRDS):
        return
    try:
        kubernetes_validate = _kubernetes_validate()
    except ImportError:
        pytest.skip("kubernetes-validate is not installed: run `make test`, which installs it")
    for minor in MINORS:
        kubernetes_validate.validate(one, minor, strict=True)


@cache
def _kubernetes_validate() -> Any:
    """It would read all definitions of a minor, 1.5 MB, anew for each object."""
    utils: Any = importlib.import_module("kubernetes_validate.utils")
    utils.schema_contents = cache(utils.schema_contents)
    return utils


def crd_validator(module: str, plural: str, version: str) -> Any:
    """Of a CRD in that module's sources, closed: an API server would drop an unknown key without a word.
    metadata is its own. Skips where the sources are missing."""
    try:
        folder = cluster_build.manifests(module)
    except ServerMissingError as error:
        pytest.skip(str(error))
    (path,) = folder.glob(f"config/components/crd/bases/*_{plural}.yaml")
    return _validator(path, version)


def operator_validator(plural: str) -> Any:
    """The same, of the Prometheus operator."""
    folder = _module(OPERATOR) / "example" / "prometheus-operator-crd"
    return _validator(folder / f"monitoring.coreos.com_{plural}.yaml", "v1")


def trainer_validator(plural: str, version: str) -> Any:
    """The same, of a release of Kubeflow Trainer, such as v2.1.0."""
    folder = _module(f"github.com/kubeflow/trainer/v2@{version}") / "manifests" / "base" / "crds"
    return _validator(folder / f"trainer.kubeflow.org_{plural}.yaml", "v1alpha1")


def kueue_validator(plural: str, version: str) -> Any:
    """The same, of a Kueue that serves that version of its API."""
    folder = kueue_crds(version)
    return _validator(folder / f"kueue.x-k8s.io_{plural}.yaml", version)


def kueue_crds(version: str) -> Path:
    return _module(f"sigs.k8s.io/kueue@{KUEUE[version]}") / "config" / "components" / "crd" / "bases"


@cache
def _module(name: str) -> Path:
    """Its folder; downloaded, once. Skips where Go or the module is missing."""
    try:
        done = subprocess.run(
            ["go", "mod", "download", "-json", name],
            cwd=tempfile.gettempdir(),
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"{name} cannot be had: {error}")
    return Path(json.loads(done.stdout)["Dir"])


@cache
def _validator(path: Path, version: str) -> Any:
    versions = yaml.load(path.read_text(), yaml.CSafeLoader)["spec"]["versions"]
    (schema,) = [one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == version]
    schema["properties"]["metadata"] = {}
    return jsonschema.Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        found.setdefault("additionalProperties", False)
    if schema.get("x-kubernetes-int-or-string"):
        found.pop("type", None)
    return found
