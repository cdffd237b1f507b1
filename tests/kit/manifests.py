"""Kubernetes objects against the published schemas, strictly and offline."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

MINORS = ("1.35", "1.36", "1.37")
# Kinds whose schema is in a CRD: an API server checks them, in the ring `cluster`.
OF_CRDS = ("jobset.x-k8s.io/", "kueue.x-k8s.io/", "monitoring.coreos.com/", "scheduling.volcano.sh/")


class _Strict(yaml.SafeLoader):
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
        kubernetes_validate = importlib.import_module("kubernetes_validate")  # has no types
    except ImportError:
        pytest.skip("kubernetes-validate is not installed: run `make test`, which installs it")
    for minor in MINORS:
        kubernetes_validate.validate(one, minor, strict=True)
