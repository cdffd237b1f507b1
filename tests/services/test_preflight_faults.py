"""Seven machines of which each but one has a fault of its own: all six are named, the healthy one is not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit import plans
from kit.preflight_gang import CLOCK, CPU, DISK, GPU, HEALTHY, LINK, STORE, relay
from kit.servers import ServerMissingError, s3_server

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]
NAMESPACES = ("--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
CGROUPS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


@pytest.fixture
def minio(tmp_path):
    try:
        with s3_server("minio", tmp_path / "minio") as server:
            yield server
    except ServerMissingError as error:
        pytest.skip(str(error))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for namespaces, cgroups and tc")
def test_six_faults_of_six_are_named(minio, tmp_path):
    minio.make_bucket("checked")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "store"))
    listener.listen()
    relay(listener, lambda: socket.create_connection(minio.host_port))
    env = plans.environment() | minio.environment()
    env |= {"KIT_STORE": str(tmp_path / "store"), "KIT_URL": "s3://checked", "KIT_NAME": str(os.getpid())}
    argv = ["unshare", *NAMESPACES, sys.executable, "-m", "kit.preflight_gang", str(tmp_path)]
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=600)
    finally:
        listener.close()
        for folder in CGROUPS:
            if (own := folder / f"mlpipe-{os.getpid()}-preflight").exists():
                own.rmdir()
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    lost = {index: line for index, line in enumerate(lines) if "checked" not in line}
    assert not lost, "\n".join(
        f"machine {index}: {how['end']}\n{how['out']}{how['err']}" for index, how in lost.items()
    )
    told = [line["checked"] for line in lines]
    assert len(told) == 7
    assert all(one["faults"] == told[0]["faults"] for one in told)  # all came to the same end
    faults = {name: "; ".join(words) for name, words in told[0]["faults"].items()}
    assert f"n{HEALTHY}" not in faults
    assert "its links reach" in faults[f"n{LINK}"]
    assert faults[f"n{CPU}"].startswith(("matmul", "memory"))  # among busy neighbours either may stand out
    assert "are free in" in faults[f"n{DISK}"]
    assert "its clock is 3.6e+03 s ahead" in faults[f"n{CLOCK}"]
    assert "store" in faults[f"n{STORE}"]
    assert "nvidia-smi ended with 6: No devices were found" in faults[f"n{GPU}"]
    assert told[0]["pairs"] == []
