"""One real cluster for all files that a test process runs; skipped with a word on what to install."""

from __future__ import annotations

import secrets

import pytest
from kit.cluster import ServerMissingError, cluster


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """The cluster. A test that takes parts of it down starts its own."""
    try:
        with cluster(tmp_path_factory.mktemp("cluster")) as one:
            yield one
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def namespace(running):
    """A fresh one that enforces `restricted`."""
    return running.namespace(f"test-{secrets.token_hex(4)}")
