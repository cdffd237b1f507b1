"""The follower's lease: there while somebody waits; and what the driver makes of one that has expired."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from kit.command_runs import Cli, shell, until, write_spec

from mlpipe.store.folder import FolderStore
from mlpipe.submit import follower
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.follower import Following, cancel_orphans

pytestmark = pytest.mark.unit


def test_the_driver_stops_for_an_expired_lease_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_LOOK_SECONDS", 0.0)
    store, stop = FolderStore(tmp_path), StopRequest()
    look = cancel_orphans(store, "r", stop)
    look()  # nobody waited
    following, other = Following(store, "r"), Following(store, "r")
    following.renew()
    look()
    other.leave()  # not its own
    key = "runs/r/follower"
    assert store.exists(key)
    following.leave()
    assert not store.exists(key)
    for broken in (b"", b"[]", b'{"expires": null}', b'{"expires": %d}' % 10**400):
        store.put(key, broken)
        look()
        other.leave()
    assert stop.kind is None
    store.put(key, json.dumps({"holder": "x", "expires": time.time() - 1}).encode())
    look()
    assert stop.kind is None, "perhaps a clock has jumped, and it is renewed"
    monkeypatch.setattr(follower, "_SILENT_SECONDS", 0.0)
    look()
    assert stop.kind == "cancelled"
    assert not store.exists(key)  # so that a resume goes on


def test_a_run_whose_follower_died(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.shorten("mlpipe.submit.follower:_LOOK_SECONDS", 0.5)
    cli.shorten("mlpipe.submit.follower:_SILENT_SECONDS", 0.5)
    path = write_spec(tmp_path, {"a": shell("touch $PWD/begun; sleep 600")})
    path.write_text(json.dumps({**json.loads(path.read_text()), "on_orphan": "cancel"}))
    lease = cli.store / "runs/r/follower"
    process = cli.start("submit", "pipeline.yaml", "--run-id", "r", "--wait")
    until(lambda: lease.exists() and (tmp_path / "begun").exists(), "the lease and the stage")
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 130
    assert lease.exists()  # the next one may take its place
    lease.write_text(json.dumps({"holder": "x", "expires": time.time() - 1}))
    cli("logs", "-f", "r")  # until it has ended
    run = cli.json("status", "r")
    assert run["state"] == "cancelled"
    assert "whoever followed it is gone" in run["message"]
