"""`python -m kit.preflight_gang FOLDER`: a preflight of seven machines, six of which have a fault each.

The machines are forks of one process that has imported torch. Real are the throttled CPU (a cgroup), the
slow link (a network namespace and tc), the full disk (a tmpfs) and the slow store (a slow relay before a
real one). Stand-ins are the wrong clock, which is Python's `time.time` with an hour more, since Linux has no
namespace for it, and the dead GPU, which a made-up nvidia-smi does not show. Runs as root, in namespaces of
its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import plans

from mlpipe._core import cpu_load
from mlpipe.plan.plan import Plan, PreflightPlan
from mlpipe.plan.process import main_of_stage
from mlpipe.train.preflight import __main__ as preflight
from mlpipe.train.preflight import machine

HEALTHY, LINK, CPU, DISK, CLOCK, STORE, GPU = range(7)
LIMITS = PreflightPlan(0.25, clock_seconds=60.0, disk_bytes=2**26, store_bytes_per_second=1e3)
HERE, THERE = "10.79.0.1", "10.79.0.2"
_STORE_BYTES_PER_SECOND = 2e6
_QUOTA = 0.02  # of one core
_SECONDS = 300.0
_CLONE_NEWNET = 0x40000000


def main(folder: Path) -> None:
    """Prints a line of JSON for each machine: what it printed, or else all that is known of its end."""
    target = os.environ["KIT_STORE"]
    fast, slow = (_store(target, rate) for rate in (None, _STORE_BYTES_PER_SECOND))
    _network()
    cgroup = _cgroup()
    tokens = plans.write_tokens(folder / "tokens", num_tokens=100)
    launch = {"num_nodes": 7, "preflight": LIMITS}
    plan = plans.train_plan(os.environ["KIT_URL"], tokens, launch=launch)
    (folder / "bin").mkdir()
    (folder / "bin" / "nvidia-smi").write_text("#!/bin/sh\necho No devices were found\nexit 6\n")
    (folder / "bin" / "nvidia-smi").chmod(0o755)
    pids = [
        _fork(folder, plan, index, f"http://{HERE}:{slow if index == STORE else fast}", cgroup)
        for index in range(7)
    ]
    deadline = time.monotonic() + _SECONDS
    ends: dict[int, str] = {}
    while len(ends) < 7 and time.monotonic() < deadline:
        for index in set(range(7)) - ends.keys():
            if (ended := os.waitpid(pids[index], os.WNOHANG)) != (0, 0):
                ends[index] = f"exit code {os.waitstatus_to_exitcode(ended[1])}"
        time.sleep(0.05)
    for index in range(7):
        if index not in ends:
            os.kill(pids[index], 9)
        said = (folder / f"out-{index}").read_text().strip()
        if not said.startswith("{"):
            end = ends.get(index, f"no end within {_SECONDS:.0f} s")
            said = json.dumps({"end": end, "out": said, "err": (folder / f"err-{index}").read_text()[-8000:]})
        print(said)


def _fork(folder: Path, plan: Plan, index: int, endpoint: str, cgroup: Path) -> int:
    scratch = folder / f"scratch-{index}"
    scratch.mkdir()
    if index == DISK:
        _run("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(scratch))
        with (scratch / "data").open("wb", buffering=0) as file:
            file.write(bytes(2**20))
    if index == GPU:
        plan = replace(plan, launch=plan.launch._replace(device="cuda"))
    (folder / f"plan-{index}.json").write_text(plan.to_json())
    if (pid := os.fork()) > 0:
        return pid
    try:
        for number, name in ((1, f"out-{index}"), (2, f"err-{index}")):
            os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
        os.environ |= {
            "JOB_COMPLETION_INDEX": str(index),
            "MLPIPE_RENDEZVOUS": f"{HERE}:29500",
            "MLPIPE_NODE_NAME": f"n{index}",
            "MLPIPE_CACHE": str(folder / f"cache-{index}"),
            "AWS_ENDPOINT_URL_S3": endpoint,
            "GLOO_SOCKET_IFNAME": "there" if index == LINK else "here",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        }
        if index == LINK:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(os.open("/run/netns/far", os.O_RDONLY), _CLONE_NEWNET) == 0
        if index == CPU:
            _throttle(cgroup)
        if index == CLOCK:
            now = time.time
            time.time = lambda: now() + 3600.0
        # each is a machine of its own here: what its neighbours take of the CPUs is nobody else's
        pytest.MonkeyPatch().setattr(cpu_load.Clock, "read", lambda: None)
        argv = ["--plan", str(folder / f"plan-{index}.json"), "--scratch", str(scratch)]
        code = main_of_stage("preflight", None, argv, preflight._run)
        sys.stdout.flush()
        os._exit(code)
    finally:
        import traceback

        traceback.print_exc()
        os._exit(1)


def _throttle(cgroup: Path) -> None:
    """While this process's speed is looked at: all else would only take fifty times as long."""
    speed = machine.speed

    def throttled(*given: Any) -> None:
        (cgroup / "cgroup.procs").write_text(str(os.getpid()))
        speed(*given)
        (cgroup.parent / "cgroup.procs").write_text(str(os.getpid()))

    pytest.MonkeyPatch().setattr(machine, "speed", throttled)


def _network() -> None:
    _run("ip", "link", "set", "lo", "up")
    _run("mount", "-t", "tmpfs", "tmpfs", "/run")
    _run("ip", "netns", "add", "far")
    _run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", "far")
    _run("ip", "addr", "add", f"{HERE}/24", "dev", "here")
    _run("ip", "link", "set", "here", "up")
    there = ("ip", "-n", "far")
    _run(*there, "addr", "add", f"{THERE}/24", "dev", "there")
    for device in ("lo", "there"):
        _run(*there, "link", "set", device, "up")
    shaped = ("tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms")
    _run("tc", "-n", "far", "qdisc", "add", "dev", "there", "root", *shaped)


def _cgroup() -> Path:
    """For a process that gets little time, by either version of cgroups."""
    name, period = f"mlpipe-{os.environ['KIT_NAME']}-preflight", 100_000  # see cluster_node.sweep
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    if (old / "cpu.cfs_quota_us").exists():
        (old / name).mkdir()
        (old / name / "cpu.cfs_period_us").write_text(str(period))
        (old / name / "cpu.cfs_quota_us").write_text(str(int(period * _QUOTA)))
        return old / name
    (new / "cgroup.subtree_control").write_text("+cpu")
    (new / name).mkdir()
    (new / name / "cpu.max").write_text(f"{int(period * _QUOTA)} {period}")
    return new / name


def relay(listener: socket.socket, connect: Callable[[], socket.socket], rate: float | None = None) -> None:
    """From each that `listener` accepts to a new connection. `rate`: bytes a second, of all together."""
    lock = threading.Lock()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either end is gone
            while data := source.recv(2**16):
                if rate is not None:
                    with lock:
                        time.sleep(len(data) / rate)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                client, _ = listener.accept()
                server = connect()
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=copy, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def _store(path: str, rate: float | None) -> int:
    """The port of the store at the socket `path`."""

    def connect() -> socket.socket:
        server = socket.socket(socket.AF_UNIX)
        server.connect(path)
        return server

    listener = socket.create_server(("", 0))
    relay(listener, connect, rate)
    return int(listener.getsockname()[1])


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True, timeout=60)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
