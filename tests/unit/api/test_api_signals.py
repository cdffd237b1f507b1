"""What a process does that is told to stop more than once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kit.command_runs import write_spec

from mlpipe._core.errors import Interrupt
from mlpipe.api.signals import heard
from mlpipe.cli import foreground
from mlpipe.cli.app import run_app
from mlpipe.submit.adopt import DriveRequest
from mlpipe.submit.executor import StopRequest

pytestmark = pytest.mark.unit


def test_a_sigterm_that_is_repeated_does_not_interrupt_what_ends_at_once():
    """A person who presses Ctrl-C again does."""
    stop = StopRequest()
    with heard((signal.SIGTERM, signal.SIGINT), stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.kind == "cancelled"
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("times", "started", "said"), [(1, ["r"], "detached; run r goes on"), (2, [], "run r may lack a driver")]
)
def test_ctrl_c_while_a_driver_is_started_says_what_is_true(
    tmp_path, monkeypatch, capsys, times, started, said
):
    """It said that the run goes on, and nobody drove it."""
    drivers: list[str] = []

    def start(request: DriveRequest) -> None:
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
        drivers.append(request.run_id)

    monkeypatch.setattr(DriveRequest, "start_driver", start)
    _interrupted(tmp_path, monkeypatch, "submit")
    assert drivers == started
    assert said in capsys.readouterr().err


def test_ctrl_c_before_a_run_is_driven_leaves_no_run_without_a_word(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(foreground, "drive_here", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    _interrupted(tmp_path, monkeypatch, "run")
    assert "`mlpipe resume r` goes on" in capsys.readouterr().err


def _interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    write_spec(folder, {"a": ["true"]})
    former = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit, match="130"):
            run_app([verb, "pipeline.yaml", "--run-id", "r"])
    finally:
        signal.signal(signal.SIGINT, former)
