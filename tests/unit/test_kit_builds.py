"""Building the test servers: a busy machine is waited for, a stuck build is not; nothing is built in vain."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from kit import cluster, cluster_build, servers
from kit.cluster_build import BuildError
from kit.command_runs import until
from kit.servers import ServerMissingError

pytestmark = pytest.mark.unit


@pytest.fixture
def go(tmp_path, monkeypatch):
    """A `go` that does what it is told to, in Python."""

    def does(text: str) -> None:
        program = tmp_path / "bin" / "go"
        program.parent.mkdir()
        program.write_text(f"#!/usr/bin/env python3\nimport time, os, sys\n{text}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")

    return does


@pytest.fixture
def looks(tmp_path, monkeypatch):
    """The builder looks often, and sees CPU time pass until the file `idle` is there."""
    made: list[int] = []

    def ticks(session: int) -> int:
        if not (tmp_path / "idle").exists():
            made.append(session)
        return len(made)

    monkeypatch.setattr(servers, "_STUCK_SECONDS", 0.05)
    monkeypatch.setattr(servers, "_cpu_ticks", ticks)
    return made


def test_cpu_time_is_that_of_a_session_and_its_dead(tmp_path):
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        [sys.executable, "-c", child + "print(flush=True); input()"], start_new_session=True, **pipes
    ) as process:
        process.stdout.readline()
        assert servers._cpu_ticks(process.pid) * 10 > os.sysconf("SC_CLK_TCK")  # of 0.2 s, in whole ticks
        process.communicate(b"\n", timeout=300)


def test_a_build_may_take_as_long_as_it_works(go, looks, tmp_path):
    go("while not os.path.exists('go on'): time.sleep(0.01)\nprint('built')")
    builds: list[str] = []
    thread = threading.Thread(
        target=lambda: builds.append(servers.go(["go", "build"], tmp_path)), daemon=True
    )
    thread.start()
    until(lambda: len(looks) > 5, "looks at it")
    (tmp_path / "go on").touch()
    thread.join(300)
    assert builds == ["built\n"]


def test_a_build_that_does_nothing_is_ended(go, looks, tmp_path):
    go("print(os.getpid(), file=open('pid', 'w'), flush=True)\nopen('idle', 'w')\ntime.sleep(600)")
    with pytest.raises(ServerMissingError, match="go build did nothing for"):
        servers.go(["go", "build"], tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_build_that_fails_says_why(go, tmp_path):
    go("sys.exit('no such module')")
    with pytest.raises(ServerMissingError, match="no such module"):
        servers.go(["go", "build"], tmp_path)


@pytest.mark.parametrize(("listed", "error"), [("0", BuildError), ("'offline'", ServerMissingError)])
def test_a_build_that_fails_is_the_machines_lack_where_a_module_is_missing(go, tmp_path, listed, error):
    go(f"sys.exit('no such module' if sys.argv[1] == 'build' else {listed})")
    with pytest.raises(error, match="no such module"):
        cluster_build._go_build("mod", cluster_build.PROGRAMS["kube"], tmp_path / "kube", ".", tmp_path)


def test_nothing_is_built_where_no_cluster_can_run(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "__file__", "/tmp/checkout/tests/kit/cluster.py")
    monkeypatch.setattr(cluster_build, "build_all", lambda: pytest.fail("built"))
    for verb in ("build", "up"):
        assert cluster.main([verb]) == 4
        assert "pods have a /tmp of their own" in capsys.readouterr().err
