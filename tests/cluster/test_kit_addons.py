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
from kit.processes import children, command_of

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
SECONDS = 400  # of a few seconds' work, on a machine that others use, too


@pytest.mark.usefixtures("running")  # skipped where there is none to be had
def test_what_a_run_asks_of_the_api_server_does_not_grow_with_the_number_of_runs(tmp_path):
    """By the benchmark, on fake nodes of a cluster of its own; a few runs instead of many."""
    argv = [sys.executable, "-m", "benchmarks.control_plane", "--quick", "--results", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr
    few, more = json.loads((tmp_path / "control_plane.json").read_text())["settings"]["sizes"]
    for part, most in (("submit", 8), ("follow", 15)):
        assert 0 < more[part]["requests_per_run"] <= most
        assert more[part]["requests_per_run"] <= few[part]["requests_per_run"] + 2


@pytest.mark.usefixtures("running")  # skipped where there is none to be had
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
