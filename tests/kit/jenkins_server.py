"""One small job for the tests of the client, on a real Jenkins or on the stand-in: it echoes its RUN_ID,
sleeps SECONDS, and ends as RESULT says. It needs no agent."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import urllib3
from kit.jenkins import TOKEN, USER, FakeJob, fake_jenkins

from mlpipe.submit.jenkins.client import job_path
from mlpipe.submit.jenkins.http import Access

PARAMETERS: dict[str, str | list[str] | None] = {
    "RUN_ID": "", "SECONDS": "0", "RESULT": ["SUCCESS", "UNSTABLE", "FAILURE", "NOT_BUILT"]
}  # fmt: skip
# sandboxed and without a step that needs a node
_SCRIPT = """pipeline {
    agent none
    stages {
        stage('a') {
            steps {
                echo "run ${params.RUN_ID}"
                sleep time: params.SECONDS as Integer, unit: 'SECONDS'
                script { currentBuild.result = params.RESULT }
            }
        }
    }
}
"""
_FOLDER = "<com.cloudbees.hudson.plugins.folder.Folder/>"


@dataclass(frozen=True)
class Place:
    """`job`: in a folder of its own, with a name that URLs must escape."""

    access: Access
    job: str


@contextlib.contextmanager
def stand_in() -> Iterator[Place]:
    with fake_jenkins() as jenkins:
        job = "mlpipe test/ü & train"
        jenkins.jobs[job] = FakeJob(PARAMETERS)
        done = threading.Event()

        def work() -> None:
            began: dict[int, float] = {}
            while not done.wait(0.01):
                with jenkins.lock:
                    for item in jenkins.items:
                        if item.cancelled:
                            continue
                        if item.build is None:
                            build = jenkins.start(item)
                            build.log = f"[Pipeline] echo\nrun {item.parameters['RUN_ID']}\n".encode()
                            began[item.number] = time.monotonic()
                        seconds = float(item.parameters["SECONDS"])
                        over = time.monotonic() - began[item.number] > seconds
                        if item.build is not None and item.build.result is None and over:
                            item.build.result, item.build.complete = item.parameters["RESULT"], True

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield Place(Access(jenkins.url, USER, TOKEN), job)
        finally:
            done.set()
            thread.join(300)
            assert not thread.is_alive(), "the builds did not stop within 10 s"


@contextlib.contextmanager
def real(access: Access) -> Iterator[Place]:
    """A folder on the server, deleted afterwards. The user needs Job/Create, Configure and Delete besides."""
    folder = f"mlpipe-test-{secrets.token_hex(4)}"
    http = urllib3.PoolManager(timeout=urllib3.Timeout(30.0), retries=False)
    headers = urllib3.make_headers(basic_auth=f"{access.user}:{access.token}")

    def post(path: str, body: str = "") -> None:
        answer = http.request(
            "POST",
            f"{access.url}/{path}",
            body=body.encode(),
            headers={**headers, "Content-Type": "application/xml; charset=utf-8"},
            redirect=False,
        )
        assert answer.status in (200, 302), f"{path}: {answer.status} {answer.data[:500]!r}"

    post(f"createItem?name={folder}", _FOLDER)
    try:
        post(f"{job_path(folder)}/createItem?name=%C3%BC%20train", _config())
        yield Place(access, f"{folder}/ü train")
    finally:
        post(f"{job_path(folder)}/doDelete")


def _config() -> str:
    definitions = ""
    for name, default in PARAMETERS.items():
        if isinstance(default, list):
            choices = "".join(f"<string>{choice}</string>" for choice in default)
            definitions += (
                f"<hudson.model.ChoiceParameterDefinition><name>{name}</name>"
                f'<choices class="java.util.Arrays$ArrayList"><a class="string-array">{choices}</a></choices>'
                "</hudson.model.ChoiceParameterDefinition>"
            )
        else:
            definitions += (
                f"<hudson.model.StringParameterDefinition><name>{name}</name>"
                f"<defaultValue>{default}</defaultValue></hudson.model.StringParameterDefinition>"
            )
    return (
        "<flow-definition><properties><hudson.model.ParametersDefinitionProperty><parameterDefinitions>"
        f"{definitions}</parameterDefinitions></hudson.model.ParametersDefinitionProperty></properties>"
        '<definition class="org.jenkinsci.plugins.workflow.cps.CpsFlowDefinition">'
        f"<script>{escape(_SCRIPT)}</script><sandbox>true</sandbox></definition></flow-definition>"
    )
