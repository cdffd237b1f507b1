"""The client of Jenkins over real sockets, against the stand-in of `kit/jenkins.py`; no Jenkins is there."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.jenkins import PASSWORD, TOKEN, USER, FakeJenkins, FakeJob, Fault, fake_jenkins

from mlpipe._core.errors import SubmitError
from mlpipe.submit.jenkins.client import Build, Jenkins, Waiting, failure_of, job_path
from mlpipe.submit.jenkins.http import Access

pytestmark = pytest.mark.unit
JOB = "team/train"
ASKED = {"RUN_ID": "run-1", "OVERRIDES": 'a=it\'s ü&b="c"\nd=$x'}


@pytest.fixture
def server() -> Iterator[FakeJenkins]:
    with fake_jenkins() as jenkins:
        jenkins.jobs[JOB] = FakeJob({"RUN_ID": "", "OVERRIDES": "", "BACKEND": "kubernetes"})
        yield jenkins


def client(server: FakeJenkins, token: str = TOKEN, **options: float) -> Jenkins:
    environment = {"JENKINS_URL": server.url, "JENKINS_USER_ID": USER, "JENKINS_API_TOKEN": token}
    options = {"poll_seconds": 0.01, "patience_seconds": 0.5, "lost_seconds": 0.5, **options}
    return Jenkins(Access.from_environment(environment), **options)


def posts(server: FakeJenkins) -> list[str]:
    return [request for request in server.requests if request.startswith("POST")]


def test_from_trigger_to_result(server: FakeJenkins) -> None:
    jenkins = client(server)
    waiting = jenkins.trigger(JOB, ASKED)
    assert isinstance(waiting, Waiting)
    (item,) = server.items
    assert item.parameters == {**ASKED, "BACKEND": "kubernetes"}  # byte for byte, and the job's default
    said: list[str] = []

    def say(why: str) -> None:
        said.append(why)
        server.start(item)

    build = jenkins.wait_for_build(waiting, 10, say)
    assert said == ["Waiting for next available executor"]
    assert build == Build(JOB, 1, f"{server.url}/job/team/job/train/1/")
    fake = server.jobs[JOB].builds[0]
    fake.log = b"one\ntwo\nhal"
    pieces = []
    for data, offset in jenkins.follow_log(build):
        pieces.append((data, offset))
        if not fake.complete:
            fake.log += b"f\nlast"
            fake.complete, fake.result = True, "SUCCESS"
    assert pieces == [(b"one\ntwo\n", 8), (b"half\nlast", 17)]
    assert jenkins.result(build) == "SUCCESS"
    assert failure_of("SUCCESS") is None
    assert [failure_of(found) for found in ("ABORTED", "FAILURE", "UNSTABLE")] == [
        "cancelled",
        "failed",
        "failed",
    ]


@pytest.mark.parametrize("started", [False, True], ids=["in the queue", "already a build"])
def test_a_trigger_whose_answer_was_lost_is_found_again(server: FakeJenkins, started: bool) -> None:
    server.faults = [Fault("POST .*buildWithParameters", "lost")]
    if started:
        threading.Thread(target=start_soon, args=(server,)).start()
    found = client(server, lost_seconds=300).trigger(JOB, ASKED)
    assert len(posts(server)) == 1
    if isinstance(found, Waiting):
        if not started:
            server.start(server.items[0])
        found = client(server).wait_for_build(found, 300)
    assert found.number == 1
    assert len(server.jobs[JOB].builds) == 1


def start_soon(server: FakeJenkins) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if server.items:
            server.start(server.items[0])
            return
        time.sleep(0.001)


def test_a_trigger_that_never_arrived_is_not_sent_again(server: FakeJenkins) -> None:
    server.faults = [Fault("POST .*buildWithParameters", "closed")]
    with pytest.raises(SubmitError, match=r"answer to the trigger was lost .*RUN_ID=run-1") as caught:
        client(server).trigger(JOB, ASKED)
    assert "same run id" in str(caught.value.hint)
    assert len(posts(server)) == 1
    assert isinstance(client(server).trigger(JOB, ASKED), Waiting)  # the person asked again
    assert len(server.items) == 1


def test_a_run_that_has_a_build_gets_no_second_one(server: FakeJenkins) -> None:
    jenkins = client(server)
    first = jenkins.trigger(JOB, ASKED)
    assert jenkins.trigger(JOB, ASKED) == first
    server.start(server.items[0])
    assert jenkins.trigger(JOB, ASKED) == jenkins.find(JOB, "run-1") == Build(
        JOB, 1, f"{server.url}/job/team/job/train/1/"
    )  # fmt: skip
    assert len(posts(server)) == 1
    assert isinstance(jenkins.trigger(JOB, {"RUN_ID": "run-2"}), Waiting)
    server.jobs["other"] = FakeJob({"RUN_ID": ""})
    assert jenkins.find("other", "run-1") is None
    assert jenkins.find("other", "run-2") is None


def test_a_queue_item_that_has_expired(server: FakeJenkins) -> None:
    jenkins = client(server)
    waiting = jenkins.trigger(JOB, ASKED)
    assert isinstance(waiting, Waiting)
    server.start(server.items.pop())
    assert jenkins.wait_for_build(waiting, 10).number == 1
    server.jobs[JOB].builds.clear()
    with pytest.raises(SubmitError, match="neither in the queue nor among"):
        jenkins.wait_for_build(waiting, 10)


def test_a_slow_queue_and_a_cancelled_item(server: FakeJenkins) -> None:
    jenkins = client(server)
    waiting = jenkins.trigger(JOB, ASKED)
    assert isinstance(waiting, Waiting)
    with pytest.raises(
        SubmitError, match="still in the queue after 0 s: Waiting for next available executor"
    ):
        jenkins.wait_for_build(waiting, 0.1)
    server.faults = [Fault("POST .*cancelItem", "lost")]
    jenkins.stop(waiting)
    with pytest.raises(SubmitError, match="somebody cancelled") as caught:
        jenkins.wait_for_build(waiting, 10)
    assert caught.value.kind == "cancelled"


def test_stop_aborts_a_build(server: FakeJenkins) -> None:
    jenkins = client(server)
    jenkins.trigger(JOB, ASKED)
    server.start(server.items[0])
    build = jenkins.find(JOB, "run-1")
    assert isinstance(build, Build)
    jenkins.stop(build)
    assert jenkins.result(build) == "ABORTED"


def test_crumbs_are_fetched_and_renewed(server: FakeJenkins) -> None:
    jenkins = client(server, token=PASSWORD)
    jenkins.trigger(JOB, ASKED)
    server.crumbs.clear()  # the session has expired
    jenkins.trigger(JOB, {"RUN_ID": "run-2"})
    assert len(server.items) == 2
    assert len(posts(server)) == 3  # the second was first refused, which starts nothing
    server.faults = [Fault("crumbIssuer", 404, 99)]  # a server that wants none
    client(server).trigger(JOB, {"RUN_ID": "run-3"})
    assert len(posts(server)) == 4
    server.faults = [Fault("crumbIssuer", "closed", 2)]  # a question, which may be asked again
    client(server).trigger(JOB, {"RUN_ID": "run-4"})
    assert [item.parameters["RUN_ID"] for item in server.items] == ["run-1", "run-2", "run-3", "run-4"]


def test_the_log_survives_a_restart_and_a_cut(server: FakeJenkins) -> None:
    jenkins = client(server)
    jenkins.trigger(JOB, ASKED)
    fake = server.start(server.items[0])
    fake.log = b"one\ntwo\n"
    build = jenkins.find(JOB, "run-1")
    assert isinstance(build, Build)
    log = jenkins.follow_log(build)
    assert next(log) == (b"one\ntwo\n", 8)
    server.faults = [Fault("progressiveText", "closed", 3), Fault("progressiveText", 503, 3)]
    fake.log += b"three\n"
    assert next(log) == (b"three\n", 14)
    fake.log, fake.complete = b"new\n", True
    assert next(log)[0].startswith(b"(the log was cut in Jenkins")
    assert next(log) == (b"new\n", 4)
    assert list(log) == []
    assert list(jenkins.follow_log(build, offset=4)) == []


def test_a_question_is_asked_again_and_a_post_is_not(server: FakeJenkins) -> None:
    server.faults = [Fault("GET", 500, 2), Fault("GET", "closed", 2)]
    assert client(server, patience_seconds=10).find(JOB, "x") is None
    server.faults = [Fault("POST", 500, 9)]
    with pytest.raises(SubmitError, match=r"an error of its own \(500\)"):
        client(server).trigger(JOB, ASKED)
    assert len(posts(server)) == 1


def failure(
    server: FakeJenkins, job: str = JOB, parameters: dict[str, str] = ASKED, token: str = TOKEN
) -> Any:
    with pytest.raises(SubmitError) as caught:
        client(server, token=token, patience_seconds=0.05).trigger(job, parameters)
    return caught.value


def test_errors_in_words(server: FakeJenkins) -> None:
    error = failure(server, token="wrong")
    assert "does not know this user or token (401)" in error.message
    assert error.kind == "input"
    assert "no such job or build (404)" in failure(server, job="team/none").message
    server.jobs[JOB].disabled = True
    assert "is disabled (409)" in failure(server).message
    server.jobs[JOB].disabled = False
    server.allowed = False
    assert "does not allow this (403)" in failure(server).message
    server.allowed = True
    server.faults = [Fault("GET", 500, 1000)]
    error = failure(server)
    assert "an error of its own (500)" in error.message
    assert error.kind == "infrastructure"
    server.faults = []
    unknown = failure(server, parameters={"RUN_ID": "a", "STRATEGY": "ddp", "NODES": "2"})
    assert "no parameter NODES, STRATEGY; it has RUN_ID, OVERRIDES, BACKEND" in unknown.message
    server.jobs["plain"] = FakeJob(None)
    assert "it has none" in failure(server, job="plain").message
    assert server.items == []


def test_unreachable() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        access = Access(f"http://127.0.0.1:{taken.getsockname()[1]}", USER, TOKEN)
        with pytest.raises(SubmitError, match=r"cannot be reached: .*Connection refused") as caught:
            Jenkins(access, poll_seconds=0.01, patience_seconds=0.05).trigger(JOB, ASKED)
    assert caught.value.kind == "infrastructure"


def test_the_environment() -> None:
    for environment, words in (
        ({}, "does not say where"),
        ({"JENKINS_URL": "jenkins.example.com"}, "does not say where"),
        ({"JENKINS_URL": "http://anna:secret@jenkins.example.com"}, "an address and nothing else"),
        ({"JENKINS_URL": "http://jenkins.example.com", "JENKINS_USER_ID": "anna"}, "belong together"),
    ):
        with pytest.raises(SubmitError, match=words) as caught:
            Access.from_environment(environment)
        assert "secret" not in str(caught.value)


def test_secrets_stand_nowhere(server: FakeJenkins, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    jenkins = client(server)
    jenkins.trigger(JOB, ASKED)
    server.faults = [Fault("GET", 500, 1000)]
    said = [str(failure(server)), repr(failure(server)), repr(jenkins._access), caplog.text]
    for secret in (TOKEN, "Basic "):
        assert not any(secret in text for text in [*said, *server.requests])
    assert not any("run-1" in request for request in server.requests)  # parameters in no URL either


def test_names_of_jobs() -> None:
    assert job_path("team/train") == "job/team/job/train"
    assert job_path("/a b/ü/x%2Fy/") == "job/a%20b/job/%C3%BC/job/x%252Fy"


def test_surroundings_lend_no_credentials_and_tell_none(
    server: FakeJenkins, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What requests and python-jenkins take from files and variables, and one of them logs."""
    (tmp_path / ".netrc").write_text(f"machine 127.0.0.1 login {USER} password {TOKEN}\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.setenv("JENKINS_API_EXTRA_HEADERS", "X-Gate: key-of-the-gate")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(SubmitError, match=r"\(401\)"):
        Jenkins(Access(server.url, None, None), patience_seconds=0.1).find(JOB, "x")
    assert client(server).find(JOB, "x") is None
    assert "key-of-the-gate" not in caplog.text
    assert os.environ["JENKINS_API_EXTRA_HEADERS"] == "X-Gate: key-of-the-gate"


def test_no_redirect_is_followed(server: FakeJenkins) -> None:
    """To a login page, or to where Jenkins believes it is: with the token in hand."""
    with fake_jenkins() as other:
        server.moved = other.url
        with pytest.raises(SubmitError, match=f"sends on to {other.url.removesuffix('/jenkins')}") as caught:
            client(server).find(JOB, "x")
        assert (caught.value.kind, other.requests) == ("input", [])


def test_an_answer_that_is_from_no_jenkins(server: FakeJenkins) -> None:
    server.faults = [Fault("GET", 200, 99)]  # a page of HTML
    with pytest.raises(SubmitError, match="the answer is not from a Jenkins"):
        client(server).find(JOB, "x")
