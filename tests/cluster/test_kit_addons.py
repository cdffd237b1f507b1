"""What comes on request: fake nodes; and that nothing stays behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.cluster_process import wait_until
from kit.processes import tree

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("running")  # skipped where there is none to be had
def test_requests_of_a_run_do_not_grow_with_their_number_and_nothing_outlives_a_killed_session(tmp_path):
    """By the benchmark, on fake nodes of a cluster of its own; a few runs instead of many. It is killed as
    soon as it has told what it counted: cluster and all."""
    argv = [sys.executable, "-m", "benchmarks.control_plane", "--quick", "--results", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with (tmp_path / "errors").open("wb") as errors:
        session = subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=errors)
    assert session.stdout is not None
    try:
        lines = [session.stdout.readline()]
        (network,) = {network_of(pid) for pid in tree(session.pid)} - {network_of(os.getpid()), None}
        before = in_network(network)
        lines.append(session.stdout.readline())
    finally:
        session.kill()
        session.wait(10)
    assert all(lines), (tmp_path / "errors").read_text()
    few, more = map(json.loads, lines)
    for part, most in (("submit", 8), ("follow", 15)):
        assert 0 < more[part]["requests_per_run"] <= most
        assert more[part]["requests_per_run"] <= few[part]["requests_per_run"] + 2
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
