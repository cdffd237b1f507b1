"""Both S3 servers, each started once a session; skipped with a word on what to install."""

from __future__ import annotations

import secrets

import pytest
from kit import prometheus
from kit.faultproxy import FaultProxy
from kit.servers import MODULES, ServerMissingError, s3_server

from mlpipe.store.s3 import S3Store


@pytest.fixture(scope="session", params=list(MODULES))
def server(request, tmp_path_factory):
    try:
        with s3_server(request.param, tmp_path_factory.mktemp(request.param)) as running:
            yield running
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def url(server):
    """s3:// URL of a fresh bucket, with a prefix."""
    bucket = f"b-{secrets.token_hex(6)}"
    server.make_bucket(bucket)
    return f"s3://{bucket}/pre/fix"


@pytest.fixture
def store(server, url):
    return S3Store.from_environment(url, {**server.environment(), "MLPIPE_STORE_DEADLINE_SECONDS": "30"})


@pytest.fixture
def proxy(server):
    with FaultProxy(server.host_port) as running:
        yield running


@pytest.fixture(scope="session")
def prometheus_programs():
    try:
        prometheus.build()  # unpacks two small packages where the machine has neither program
    except ServerMissingError as error:
        pytest.skip(str(error))
