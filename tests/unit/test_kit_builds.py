"""Building the test servers: a busy machine is waited for, a stuck build is not; nothing is built in vain."""

from __future__ import annotations

import os

import pytest
from kit import cluster, cluster_build, servers
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

    monkeypatch.setattr(servers, "_STUCK_SECONDS", 0.5)
    return does


def test_a_build_may_take_as_long_as_it_works(go, tmp_path):
    go("end = time.process_time() + 1.5\nwhile time.process_time() < end: pass\nprint('built')")
    assert servers.go(["go", "build"], tmp_path) == "built\n"


def test_a_build_that_does_nothing_is_ended(go, tmp_path):
    go("print(os.getpid(), file=open('pid', 'w'), flush=True)\ntime.sleep(600)")
    with pytest.raises(ServerMissingError, match="go build did nothing for"):
        servers.go(["go", "build"], tmp_path)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_build_that_fails_says_why(go, tmp_path):
    go("sys.exit('no such module')")
    with pytest.raises(ServerMissingError, match="no such module"):
        servers.go(["go", "build"], tmp_path)


def test_nothing_is_built_where_no_cluster_can_run(monkeypatch, capsys):
    monkeypatch.setattr(cluster, "__file__", "/tmp/checkout/tests/kit/cluster.py")
    monkeypatch.setattr(cluster_build, "build_all", lambda: pytest.fail("built"))
    for verb in ("build", "up"):
        assert cluster.main([verb]) == 4
        assert "pods have a /tmp of their own" in capsys.readouterr().err
