"""`mlpipe submit --to jenkins` and the verbs over such a run, from the command line and over real sockets,
against the stand-in of `kit/jenkins.py`; no Jenkins is there."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.command_runs import Cli, shell, until, write_spec
from kit.jenkins import TOKEN, USER, FakeJenkins, FakeJob, Fault, Item, fake_jenkins

from mlpipe.cli.app import run_app
from mlpipe.observe.top import Top
from mlpipe.store.folder import FolderStore
from mlpipe.submit.jenkins import hand_over

pytestmark = pytest.mark.unit
JOB = "team/train"
SUBMIT = ("submit", "pipeline.yaml", "--to", "jenkins", "--job", JOB)


@pytest.fixture
def server() -> Iterator[FakeJenkins]:
    with fake_jenkins() as jenkins:
        parameters = {"RUN_ID": "", "STORE": "", "SPEC_DIGEST": "", "BACKEND": ["kubernetes", "local"]}
        jenkins.jobs[JOB] = FakeJob(parameters)
        yield jenkins


class Here(Cli):
    """The command line in this process, which saves a second a call."""

    def __call__(self, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
        with (
            contextlib.chdir(self.folder),
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name in (*os.environ, *self.env):
                patch.setenv(name, self.env[name]) if name in self.env else patch.delenv(name)
            with pytest.raises(SystemExit) as ended:
                run_app(list(arguments))
        texts = [(stream.flush(), stream.buffer.getvalue().decode())[1] for stream in (out, err)]
        assert ended.value.code == code, texts
        return subprocess.CompletedProcess(arguments, code or 0, *texts)


@pytest.fixture
def cli(tmp_path: Path, server: FakeJenkins) -> Iterator[Cli]:
    write_spec(tmp_path, {"a": shell("echo it ran")})
    found = Here(tmp_path)
    found.env |= {"JENKINS_URL": server.url, "JENKINS_USER_ID": USER, "JENKINS_API_TOKEN": TOKEN}
    before = signal.getsignal(signal.SIGTERM)
    yield found
    signal.signal(signal.SIGTERM, before)


def queued(server: FakeJenkins) -> Item:
    return until(lambda: server.items and server.items[-1], "the trigger")


@contextlib.contextmanager
def building(server: FakeJenkins, result: str) -> Iterator[None]:
    """The next build leaves the queue and ends."""

    def build(before: int = len(server.items)) -> None:
        item = until(lambda: len(server.items) > before and server.items[-1], "the trigger")
        with server.lock:
            server.start(item)
            ends(server, result)

    thread = threading.Thread(target=build)
    thread.start()
    try:
        yield
    finally:
        thread.join(300)
        assert not thread.is_alive(), "no build was started within 60 s"


def ends(server: FakeJenkins, result: str, log: bytes = b"the build's own log\n") -> None:
    with server.lock:
        build = server.jobs[JOB].builds[-1]
        build.log, build.result, build.complete = log, result, True


def test_a_build_is_followed_to_its_end(cli: Cli, server: FakeJenkins) -> None:
    submit = (*SUBMIT, "--set", "name=other", "--parameter", "BACKEND=local", "--wait")
    with building(server, "SUCCESS"):
        done = cli(*submit)
    given = server.items[0].parameters
    run_id = given["RUN_ID"]
    assert run_id.startswith("other-")
    assert given["STORE"] == str(cli.store)
    assert given["BACKEND"] == "local"
    assert done.stdout == f"{run_id}\n{server.url}/job/team/job/train/1/ SUCCESS\n"
    assert "the build's own log" in done.stderr
    # what the build does with them: the very pipeline, or none
    asked = ("spec", run_id, "--digest", given["SPEC_DIGEST"], "--out", "asked.yaml")
    cli(*asked, "--stages", "a")
    assert cli.json("plan", "asked.yaml")["stages"][0]["plan"]["spec_digest"] == given["SPEC_DIGEST"]
    assert "the build has b" in cli(*asked, "--stages", "b", code=2).stderr
    assert "not the one" in cli("spec", run_id, "--digest", "0" * 64, code=2).stderr
    stored = b"".join(path.read_bytes() for path in cli.store.rglob("*") if path.is_file())
    assert TOKEN not in done.stdout + done.stderr + stored.decode()
    again = cli.json(*submit, "--run-id", run_id)
    assert again["result"] == "SUCCESS"  # adopted, not built twice
    assert len(server.jobs[JOB].builds) == 1
    assert "another pipeline" in cli(*SUBMIT, "--run-id", run_id, code=2).stderr


def test_the_result_is_the_exit_code_and_a_new_build_goes_on(cli: Cli, server: FakeJenkins) -> None:
    for result, code in (("FAILURE", 3), ("ABORTED", 5), ("SUCCESS", 0)):
        with building(server, result):
            cli(*SUBMIT, "--run-id", "r", "--wait", code=code)
    assert [build.parameters["RUN_ID"] for build in server.jobs[JOB].builds] == ["r"] * 3


def test_waiting_only_detaches(cli: Cli, server: FakeJenkins) -> None:
    server.faults = [Fault("POST .*buildWithParameters", "lost")]  # found again, not sent again
    process = cli.start(*SUBMIT, "--run-id", "r", "--wait")
    server.start(queued(server))
    until(lambda: any("logText" in request for request in server.requests), "the log")
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "detached; the build of run r goes on" in err
    assert server.jobs[JOB].builds[0].result is None
    assert len([request for request in server.requests if request.startswith("POST")]) == 1


def test_before_the_build_has_made_the_run(
    cli: Cli, server: FakeJenkins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hand_over, "_LOOK_SECONDS", 0.1)
    found = cli(*SUBMIT, "--run-id", "r")  # it stays in the queue
    assert found.stdout == f"r\n{server.url}/queue/item/100/\n"
    assert "Waiting for next available executor" in found.stderr
    status = cli.json("status", "r")
    assert (status["state"], status["build"]) == ("queued", f"{server.url}/queue/item/100/")
    assert "no logs yet: r  queued: Waiting for next" in cli("logs", "r").stdout
    assert [run["state"] for run in cli.json("list")["runs"]] == ["queued"]
    assert Top(FolderStore(cli.store)).runs(9) == []
    url = cli.env["JENKINS_URL"]
    cli.env["JENKINS_URL"] = "http://127.0.0.1:1"  # the token goes nowhere else
    assert f"its Jenkins is {url}" in cli("status", "r").stdout
    assert f"its Jenkins is {url}" in cli("cancel", "r", code=2).stderr
    cli.env["JENKINS_URL"] = url
    assert "cancelled before its build made a run" in cli("cancel", "r").stdout
    assert server.items[0].cancelled
    assert [run["state"] for run in cli.json("list")["runs"]] == ["cancelled"]


def test_a_build_that_has_a_run(cli: Cli, server: FakeJenkins) -> None:
    server.start(Item(100, JOB, {"RUN_ID": "r", "BACKEND": "local"}))
    assert cli(*SUBMIT, "--run-id", "r").stdout.endswith("/job/team/job/train/1/\n")
    assert cli.json("status", "r")["state"] == "building"
    cli("spec", "r", "--out", "asked.yaml")
    cli("submit", "asked.yaml", "--run-id", "r", "--wait")  # what the build does
    assert cli.json("status", "r")["state"] == "done"
    assert "it ran" in cli("logs", "r").stdout
    assert [run["state"] for run in cli.json("list")["runs"]] == ["done"]
    cli("cancel", "r")
    assert server.jobs[JOB].builds[0].result == "ABORTED"  # its later steps have nothing to do


WRONG: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "unknown": ({"RUN_ID": "", "OTHER": ""}, (), "has no parameter SPEC_DIGEST, STORE; it has RUN_ID, OTHER"),
    "needed": ({"RUN_ID": "", "STORE": "", "SPEC_DIGEST": "", "FILE": None}, (), "needs FILE"),
    "choice": (
        {"RUN_ID": "", "STORE": "", "SPEC_DIGEST": "", "BACKEND": ["kubernetes"]},
        ("--parameter", "BACKEND=local"),
        "is one of kubernetes, not 'local'",
    ),
}


def test_a_trigger_that_would_be_wrong_leaves_nothing(cli: Cli, server: FakeJenkins) -> None:
    for parameters, more, words in WRONG.values():
        server.jobs[JOB] = FakeJob(parameters)
        assert words in cli(*SUBMIT, *more, code=2).stderr
    assert "has no such job" in cli(*SUBMIT[:-1], "team/other", code=2).stderr
    assert not [request for request in server.requests if request.startswith("POST")]
    assert not cli.store.exists() or not list(cli.store.rglob("jenkins.json"))
    assert "needs --job" in cli(*SUBMIT[:-2], code=2).stderr
    dry = json.loads(cli(*SUBMIT, "--dry-run", "--run-id", "r").stdout)
    assert dry["post"] == f"{server.url}/job/team/job/train/buildWithParameters"
    assert dry["parameters"]["RUN_ID"] == "r"
