"""Of ranks that hang the launcher blames the one that the others wait for, whether it had a word or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from kit import plans
from kit.command_runs import until

from mlpipe.train import outcome, stop
from mlpipe.train.launcher import Launcher

pytestmark = pytest.mark.unit


@pytest.fixture
def ranks(tmp_path):
    """Processes of ranks 0 and 1, which said where they are."""
    idle = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = [subprocess.Popen(idle) for _ in range(2)]
    for rank, process in enumerate(found):
        (tmp_path / f"pid-0-{rank}").write_text(f"{process.pid} {rank}")
    yield found
    for process in found:
        process.kill()
        process.wait(300)


@pytest.fixture
def launcher(tmp_path):
    plan = plans.train_plan(tmp_path / "store", plans.write_tokens(tmp_path / "tokens", num_tokens=100))
    return Launcher(plan, tmp_path / "plan.json", tmp_path)


def freeze(process, scratch):
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: stop.ranks(scratch, stopped=True), "the rank to be stopped")


def blamed(launcher):
    launcher._name_stopped()
    found = launcher._outcome(1, "", 0)
    assert (found.outcome, found.kind, found.cause) == ("failed", "failed", "hang")
    return found.rank, found.message


def test_a_stopped_rank_is_blamed_not_the_one_that_waits(ranks, launcher, tmp_path):
    freeze(ranks[1], tmp_path)
    outcome.write(tmp_path, outcome.hang(0, 5, "waits for other ranks", waiting=True), fatal=True)
    rank, message = blamed(launcher)
    assert rank == 1
    assert message.startswith("rank 1 is stopped, by a signal (SIGSTOP) or a debugger")
    assert ranks[1].wait(300) == -signal.SIGKILL  # all here have spoken


def test_a_stopped_rank_of_a_node_on_which_nobody_waits_is_named_in_time(ranks, launcher, tmp_path):
    freeze(ranks[1], tmp_path)
    launcher._name_stopped()
    assert outcome.fatal_files(tmp_path) == []  # it may go on
    launcher.stopped[1] -= launcher.hang_timeout_seconds + 1
    assert blamed(launcher)[0] == 1
    os.kill(ranks[1].pid, signal.SIGCONT)
    until(lambda: not stop.ranks(tmp_path, stopped=True), "the rank to go on")
    launcher._name_stopped()
    assert launcher.stopped == {}


def test_a_rank_that_has_no_word_is_blamed_where_all_others_wait(ranks, launcher, tmp_path):
    outcome.write(tmp_path, outcome.hang(0, 5, "waits for other ranks", waiting=True), fatal=True)
    assert blamed(launcher) == (
        1,
        "rank 1 hangs, and so does its watchdog: native code that holds Python's lock?",
    )


def test_a_rank_that_hangs_is_blamed_though_one_that_waits_spoke_first(ranks, launcher, tmp_path):
    outcome.write(tmp_path, outcome.hang(0, 5, "waits for other ranks", waiting=True), fatal=True)
    outcome.write(tmp_path, outcome.hang(1, 5, "hangs"), fatal=True)
    assert blamed(launcher) == (1, "rank 1 hangs")


@pytest.mark.parametrize(
    ("num_signals", "there", "said", "expected"),
    [
        (1, True, False, None),  # it saves
        (1, False, False, -signal.SIGTERM),  # nobody here has begun
        (1, False, True, None),  # all have done their work
        (2, True, False, -signal.SIGKILL),
    ],
)
def test_a_stop_waits_for_ranks_that_save_and_for_no_others(
    ranks, launcher, tmp_path, monkeypatch, num_signals, there, said, expected
):
    """The second process is torchrun's here."""
    monkeypatch.setattr("mlpipe.train.launcher._SECOND_SIGNAL_SECONDS", 0.0)
    (tmp_path / "pid-0-1").unlink()
    if not there:
        (tmp_path / "pid-0-0").unlink()
    if said:
        outcome.write(tmp_path, outcome.Outcome("saved", rank=0))
    for _ in range(num_signals):
        launcher._on_signal(signal.SIGTERM, None)
    launcher._end_if_overdue(ranks[1])
    assert ranks[1].poll() == expected
    assert (tmp_path / "stop").exists()
