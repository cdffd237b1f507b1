"""`mlpipe logs` from a store alone: ranks, restarts, attempts, times. Writers are played by the test."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from kit.command_runs import Cli

from mlpipe.api.watch import Lines
from mlpipe.cli.app import run_app
from mlpipe.cli.session import CliSession
from mlpipe.observe.logs import Reader
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore

pytestmark = pytest.mark.unit
NOW = 1_700_000_000.0


def stamped(when: float, text: str) -> bytes:
    said = datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds")
    return f"{said.removesuffix('+00:00')}Z {text}\n".encode()


class Made:
    """A run `r` in a folder store: stages `corpus`, a command, and `train`, two nodes of two workers."""

    def __init__(self, folder: Path) -> None:
        self.cli = Cli(folder)
        self.store = FolderStore(self.cli.store)
        stages = ["corpus", "train"]
        runs.create_run(self.store, "r", "version: 1\n", "d", stages, "kubernetes", {"stages": stages})

    def change(self, stage: str, **changes: object) -> runs.RunState:
        return runs.update_run(
            self.store,
            "r",
            lambda run: replace(run, stages={**run.stages, stage: replace(run.stages[stage], **changes)}),
        )

    def begin(self, stage: str, attempt: int = 1, **plan: object) -> None:
        launch = {"num_nodes": 2, "nproc_per_node": 2}
        text = json.dumps({"command": None, "launch": launch, **plan})
        self.store.put(f"runs/r/stages/{stage}/attempt-{attempt}/plan.json", text.encode())
        self.change(stage, state="running", attempt=attempt, started=NOW)

    def log(self, stage: str, name: str, *pieces: bytes, attempt: int = 1) -> None:
        """By a writer of its own, as of a launcher that has just started."""
        writer = self.store.open_log(f"runs/r/stages/{stage}/attempt-{attempt}/logs/{name}.log")
        for piece in pieces:
            writer.write(piece)
        writer.close()

    def read(self, *arguments: str) -> str:
        return self.cli("logs", "r", *arguments).stdout


@pytest.fixture
def made(tmp_path) -> Made:
    return Made(tmp_path)


def test_ranks_are_interleaved_by_time_and_say_who_they_are(made):
    made.begin("train")
    made.log("train", "rank-0", stamped(NOW, "a"), b"  a, second line\n", stamped(NOW + 2, "d"))
    made.log("train", "rank-1", stamped(NOW + 1, "b"), stamped(NOW + 1.5, "c"))
    lines = ["[rank 0] a", "[rank 0]   a, second line", "[rank 1] b", "[rank 1] c", "[rank 0] d"]
    assert made.read("--stage", "train").splitlines() == lines
    assert made.read().splitlines() == [f"train | {line}" for line in lines]
    assert made.read("--stage", "train", "--rank", "1") == "b\nc\n"
    none = made.cli("logs", "r", "--stage", "train", "--rank", "9")
    assert (none.stdout, none.stderr) == ("", "run r has no log of rank 9 (yet)\n")
    logs = made.cli.json("logs", "r")["logs"]
    assert [(one["rank"], one["text"]) for one in logs] == [(0, "a\n  a, second line\nd\n"), (1, "b\nc\n")]
    assert made.read("--stage", "train", "--tail", "1").splitlines() == ["[rank 1] c", "[rank 0] d"]


def test_since_takes_lines_by_their_time(made):
    now = time.time()
    made.begin("corpus", command=["true"])
    made.change("corpus", state="done", ended=now - 7200)
    made.begin("train")
    made.log("corpus", "rank-0", b"of a command\n")
    made.log("train", "rank-0", stamped(now - 5400, "early"), stamped(now - 60, "late"), b"  goes on\n")
    assert made.read("--since", "1 h", "--rank", "0").splitlines() == ["train | late", "train |   goes on"]
    assert made.read("--since", "2 h", "--stage", "train").count("\n") == 3
    assert "of a command" in made.read("--since", "3 h")
    assert "write a number and a unit" in made.cli("logs", "r", "--since", "soon", code=2).stderr


def test_of_a_launcher_the_times_are_those_of_its_ranks(made):
    """On one machine the launcher's log has the lines of all ranks, and no times."""
    made.begin("train")
    made.log("train", "launcher", b"[rank 0] old\n[rank 0] new\n")
    made.log("train", "rank-0", stamped(NOW, "old"), stamped(time.time(), "new"))
    assert made.read("--stage", "train") == "[rank 0] old\n[rank 0] new\n"
    assert made.read("--stage", "train", "--since", "1 h") == "[rank 0] new\n"


def test_a_command_that_prints_times_keeps_them(made):
    made.begin("corpus", command=["true"])
    made.log("corpus", "rank-0", stamped(NOW, "mine"))
    assert made.read("--stage", "corpus") == stamped(NOW, "mine").decode()


def test_nothing_is_lost_or_told_twice_across_gang_restarts_and_attempts(made):
    """Writers end and come back, the last in the middle of a line; attempts begin between two looks."""
    reader = Reader(made.store, None, None)
    told: list[bytes] = []

    def look(*, rest: bool = False) -> None:
        found = reader.read(runs.read_run(made.store, "r"), rest=rest)
        told.extend(line.text for _, lines in found for line in lines)

    expected = []
    made.begin("train")
    for restart in range(3):
        for rank in (0, 1):
            for number in range(4):
                expected.append(f"{restart} {rank} {number}\n".encode())
                made.log("train", f"rank-{rank}", stamped(NOW, expected[-1].decode().strip()))
                if number % 2:
                    look()
                    look()
    made.log("train", "rank-0", b"cut off")  # by a kill
    look()
    assert b"cut off\n" not in told
    made.change("train", state="failed", ended=NOW)
    runs.reopen(made.store, "r")
    made.begin("train", attempt=2)
    made.log("train", "rank-0", stamped(NOW, "of attempt 2"), attempt=2)
    runs.update_run(made.store, "r", lambda run: run)
    made.change("train", state="failed", ended=NOW)
    runs.reopen(made.store, "r")
    made.begin("train", attempt=3)
    made.log("train", "rank-3", stamped(NOW, "of attempt 3"), attempt=3)
    look()
    look(rest=True)
    assert sorted(told) == sorted([*expected, b"cut off\n", b"of attempt 2\n", b"of attempt 3\n"])


def test_following_a_writer_that_is_restarted(made):
    made.begin("train")
    lease = runs.Lease("driver", "elsewhere", 1, time.time() + 600)
    runs.update_run(made.store, "r", lambda run: replace(run, state="running", driver=lease))
    following = made.cli.start("logs", "-f", "r", "--stage", "train")
    expected = []

    def write() -> None:
        for restart in range(4):
            for number in range(5):
                expected.append(f"[rank 1] {restart} {number}")
                line = stamped(NOW + len(expected), f"{restart} {number}")
                made.log("train", "rank-1", line[:9], line[9:])
                time.sleep(0.03)

    writer = threading.Thread(target=write)
    writer.start()
    writer.join(300)
    assert not writer.is_alive()
    made.change("train", state="done", ended=NOW)
    runs.update_run(made.store, "r", lambda run: replace(run, state="done"))
    out, err = following.communicate(timeout=300)
    assert (following.returncode, err) == (0, "")
    assert out.splitlines() == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_detaches_and_says_how_to_come_back(made, number):
    made.begin("train")
    made.log("train", "rank-0", stamped(NOW, "hello"))
    lease = runs.Lease("driver", "elsewhere", 1, time.time() + 600)
    runs.update_run(made.store, "r", lambda run: replace(run, state="running", driver=lease))
    following = made.cli.start("logs", "-f", "r")
    assert "hello" in following.stdout.readline()
    following.send_signal(number)
    _, err = following.communicate(timeout=300)
    assert following.returncode == 130
    assert "detached; run r goes on. Come back with `mlpipe logs -f r`" in err
    assert runs.read_run(made.store, "r").state == "running"


def test_no_verb_has_a_terminal_obey_what_stands_in_a_store(made, monkeypatch, capsysbinary):
    said = "a\x1b]0;mine\a"
    made.begin("corpus", command=["true"])
    made.change("corpus", message=said + "PAIR")
    made.store.put("runs/r/run.json", made.store.get("runs/r/run.json").replace(b"PAIR", rb"\ud800"))
    made.log("corpus", "rank-0", b"50 %\r100 % \x1b[32mok \x1b]0;mine\a\xff\n")
    monkeypatch.setenv("MLPIPE_STORE", str(made.cli.store))

    def shown(*arguments: str) -> bytes:
        with pytest.raises(SystemExit, match="0"):
            run_app([*arguments])
        return capsysbinary.readouterr().out

    assert rb"a\x1b]0;mine\x07\ud800" in shown("status", "r")
    assert shown("logs", "r", "--stage", "corpus").endswith(b"\x1b]0;mine\a\xff\n")  # into a pipe as it is
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    on_terminal = shown("logs", "r", "--stage", "corpus")
    assert on_terminal == "50 %\r100 % \x1b[32mok \\x1b]0;mine\\x07\ufffd\n".encode()
    Lines(quiet=False).complain(said)
    assert capsysbinary.readouterr().err == b"a\\x1b]0;mine\\x07\n"


def test_a_document_goes_into_a_file_as_it_is_and_no_terminal_obeys_it(monkeypatch, capsysbinary):
    text, session = "a: \rb \u202e \x1b[31mred\x1b[2J", CliSession()
    session.result({}, text, as_it_is=True)
    assert capsysbinary.readouterr().out == f"{text}\n".encode()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    session.result({}, text, as_it_is=True)
    assert capsysbinary.readouterr().out == b"a: \\rb \\u202e \x1b[31mred\\x1b[2J\n"
    session.json = True
    session.result({"a": "\x7f"}, text)
    assert json.loads(capsysbinary.readouterr().out) == {"a": "\x7f"}
