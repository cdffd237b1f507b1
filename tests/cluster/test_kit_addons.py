"""What comes on request: fake nodes; and that nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.cluster import ServerMissingError, cluster
from kit.cluster_objects import job, pod_template
from kit.cluster_process import wait_until
from kit.processes import children, command_of

pytestmark = pytest.mark.cluster

NUM_FAKE = 5
SECONDS = 240  # of a few seconds' work, on a machine that others use, too


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    try:
        with cluster(tmp_path_factory.mktemp("full"), jobset=False, minio=False, fake_nodes=NUM_FAKE) as one:
            yield one
    except ServerMissingError as error:
        pytest.skip(str(error))


def test_fake_nodes_take_pods_by_the_dozen(full):
    namespace = full.namespace("fake")
    pod = pod_template("nowhere.test/none:1", ["true"])
    pod["spec"]["nodeSelector"] = {"type": "kwok"}
    pod["spec"]["tolerations"] = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
    full.apply(job("wide", namespace, pod, num_pods=50))
    full.wait_for_job("wide", namespace, SECONDS)


@pytest.mark.usefixtures("full")  # skipped where there is none to be had
def test_nothing_outlives_a_killed_session(tmp_path):
    command = [sys.executable, "-m", "kit.cluster", "up", "sleep", "1000"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    session = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:

        def inner():
            assert session.poll() is None
            return next((pid for pid in children(session.pid) if command_of(pid).startswith("sleep")), None)

        network = network_of(wait_until("the command in the new cluster", inner, SECONDS))
        before = in_network(network)
    finally:
        session.kill()
        session.wait(10)
    assert len(before) > 8
    wait_until("the end of all that it started", lambda: not in_network(network), 10)


def network_of(pid):
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")


def in_network(network):
    """All processes of the machine in that network namespace."""
    return [
        pid for one in Path("/proc").iterdir() if (pid := one.name).isdigit() and network_of(pid) == network
    ]
