"""The client of Jenkins on a whole server: the stand-in of `kit/jenkins.py`, and with
`make test-jenkins JENKINS_URL=...` a real one, by the same tests. Faults are injected in the unit ring."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from kit.command_runs import until
from kit.jenkins_server import Place, real, stand_in

from mlpipe._core.errors import SubmitError
from mlpipe.submit.jenkins.client import Build, Jenkins, Waiting, failure_of
from mlpipe.submit.jenkins.http import Access

pytestmark = pytest.mark.services
QUEUE_SECONDS = 300
URL = os.environ.get("MLPIPE_TEST_JENKINS")


@pytest.fixture(scope="module", params=[f"at {URL}" if URL else "stand-in"])
def place() -> Iterator[Place]:
    with real(Access.from_environment({**os.environ, "JENKINS_URL": URL})) if URL else stand_in() as found:
        yield found


@pytest.fixture
def jenkins(place: Place) -> Jenkins:
    return Jenkins(place.access, poll_seconds=0.05 if "127.0.0.1" in place.access.url else 1.0)


def new_run() -> str:
    return f"run-{secrets.token_hex(4)}"


def built(jenkins: Jenkins, found: Waiting | Build) -> Build:
    return found if isinstance(found, Build) else jenkins.wait_for_build(found, QUEUE_SECONDS)


def test_a_build_is_triggered_once_and_followed_to_its_end(place: Place, jenkins: Jenkins) -> None:
    run_id = new_run()
    build = built(jenkins, jenkins.trigger(place.job, {"RUN_ID": run_id, "SECONDS": "1"}))
    assert built(jenkins, jenkins.trigger(place.job, {"RUN_ID": run_id})) == build
    log = b"".join(text for text, _ in jenkins.follow_log(build))
    assert f"run {run_id}\n".encode() in log
    assert jenkins.result(build) == "SUCCESS"
    size = len(log) // 2
    rest = b"".join(text for text, _ in jenkins.follow_log(build, offset=size))
    assert len(rest) < len(log)
    assert log.endswith(rest[-20:])
    found = jenkins.find(place.job, run_id)
    assert isinstance(found, Build)
    assert (found, found.result) == (build, "SUCCESS")
    assert jenkins.find(place.job, run_id, after=build.number) is None


@pytest.mark.parametrize("result", ["FAILURE", "UNSTABLE", "NOT_BUILT"])
def test_other_results(place: Place, jenkins: Jenkins, result: str) -> None:
    run_id = new_run()
    first = built(jenkins, jenkins.trigger(place.job, {"RUN_ID": run_id, "RESULT": result}))
    list(jenkins.follow_log(first))
    assert jenkins.result(first) == result
    assert failure_of(result) == "failed"
    second = built(jenkins, jenkins.trigger(place.job, {"RUN_ID": run_id}))
    assert second.number > first.number


def test_a_build_is_stopped(place: Place, jenkins: Jenkins) -> None:
    build = built(jenkins, jenkins.trigger(place.job, {"RUN_ID": new_run(), "SECONDS": "600"}))
    log = jenkins.follow_log(build)
    assert next(log)
    jenkins.stop(build)
    assert until(lambda: jenkins.result(build), "the result") == "ABORTED"
    assert failure_of("ABORTED") == "cancelled"


def test_what_a_job_does_not_take(place: Place, jenkins: Jenkins) -> None:
    for parameters, words in (
        ({"RUN_ID": "x", "OTHER": ""}, "has no parameter OTHER; it has RUN_ID, SECONDS, RESULT"),
        ({"RUN_ID": "x", "RESULT": "GREAT"}, "is one of SUCCESS, UNSTABLE, FAILURE, NOT_BUILT"),
    ):
        with pytest.raises(SubmitError, match=words):
            jenkins.trigger(place.job, parameters)
    with pytest.raises(SubmitError, match=r"\(404\)"):
        jenkins.trigger(place.job + "-none", {"RUN_ID": "x"})
    wrong = Jenkins(Access(place.access.url, place.access.user, "wrong"))
    with pytest.raises(SubmitError, match=r"\(401\)"):
        wrong.trigger(place.job, {"RUN_ID": "x"})
