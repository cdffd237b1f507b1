"""Which cluster is meant, and how it is reached: the kubernetes package reads the files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mlpipe._core.errors import SubmitError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def find_cluster(context: str | None, namespace: str | None) -> tuple[Any, str, str | None]:
    """The package's configuration, the namespace and the kubeconfig's context (None in a pod), for
    `cluster_api.connect`. Raises SubmitError (input)."""
    from kubernetes import client, config

    configuration = client.Configuration()
    with configuration_errors():
        if context is None and not os.environ.get("KUBECONFIG") and _NAMESPACE_FILE.exists():
            config.load_incluster_config(client_configuration=configuration)
            return configuration, namespace or _NAMESPACE_FILE.read_text().strip(), None
        path = os.environ.get("KUBECONFIG")  # the package would read it once, when it is imported
        contexts, active = config.list_kube_config_contexts(path)
        known = {entry["name"]: entry.get("context") or {} for entry in contexts}
        chosen = context or (active or {}).get("name", "")
        if chosen not in known:
            raise SubmitError(
                f"the kubeconfig has no context {chosen!r}",
                hint=f"it has {', '.join(sorted(known)) or 'none'}",
                kind="input",
            )
        with _heard() as said:
            config.load_kube_config(path, chosen, configuration)
    if said and not (configuration.api_key or configuration.cert_file or configuration.username):
        raise SubmitError(
            f"the login program that the kubeconfig names for context {chosen!r} failed: {said[0]}",
            hint="install it, or log in again; kubectl needs it, too",
            kind="input",
        )
    return configuration, namespace or known[chosen].get("namespace") or "default", chosen


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What the package logs: a login program that fails is no error to it, and the request that follows is
    anybody's."""
    said: list[str] = []
    handler, root = logging.Handler(logging.ERROR), logging.getLogger()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    root.addHandler(handler)
    try:
        yield said
    finally:
        root.removeHandler(handler)


@contextmanager
def configuration_errors() -> Iterator[None]:
    """What the kubernetes package raises of a kubeconfig, in words; never with a piece of the file, which
    holds credentials."""
    from kubernetes.config.config_exception import ConfigException

    try:
        yield
    except yaml.YAMLError:
        said = "the kubeconfig is not YAML"
    except (ConfigException, OSError) as error:
        said = f"no Kubernetes configuration: {error}"
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = f"the kubeconfig is not one ({type(error).__name__})"
    else:
        return
    raise SubmitError(said, hint="set KUBECONFIG to your cluster's file", kind="input")
