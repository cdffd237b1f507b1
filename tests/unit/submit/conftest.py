"""A stand-in API server, and a client of it that gives up soon."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.apiserver import ApiServer
from kit.clock import Clock, of_retries

from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.kubernetes import config as cluster_config
from mlpipe.submit.kubernetes.api import ClusterApi, connect


@pytest.fixture
def server():
    with ApiServer() as one:
        yield one


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """Of the client's retries. A test in which a server comes back has the real one."""
    return of_retries(monkeypatch)


@pytest.fixture
def api(server, tmp_path, monkeypatch, clock) -> ClusterApi:
    monkeypatch.setattr(cluster_api, "DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(cluster_api, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cluster_config, "_NAMESPACE_FILE", Path("/nowhere"))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    return connect()
