"""What a driver knows of its pods: kept up to date by a watch, through all that befalls one."""

from __future__ import annotations

import json
import threading

import pytest
from kit.apiserver import TOKEN, ApiServer, Fault
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.store.folder import FolderStore
from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.kubernetes import watch
from mlpipe.submit.kubernetes.gang import Gang
from mlpipe.submit.kubernetes.watch import Watched

pytestmark = pytest.mark.unit
WATCH, LABELS = "watch=true", {"run": "r"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watch, "_PAUSE_SECONDS", 0.05)


@pytest.fixture
def watched(server, api):
    server.put("pods", pod("a"))
    one = Watched(api, "Pod", LABELS, threading.Event())
    until(lambda: server.watches == 1, "the watch")
    yield one
    one.close()


def pod(name: str, phase: str = "Pending", labels: dict[str, str] = LABELS) -> dict:
    return {"metadata": {"name": name, "labels": labels}, "status": {"phase": phase}}


def sees(watched: Watched, **phases: str) -> None:
    def seen() -> bool:
        found = {one["metadata"]["name"]: one["status"]["phase"] for one in watched.objects() or []}
        return found == phases and watched.error is None

    until(seen, f"{phases}, not {watched.objects()}")


def test_changes_come_without_asking_again(server, watched):
    server.put("pods", pod("b"))
    server.put("pods", pod("c", labels={"run": "other"}))
    server.put("pods", pod("a", "Running"))
    sees(watched, a="Running", b="Pending")
    server.drop("pods", "b")
    sees(watched, a="Running")
    assert len(server.requests) == 2  # a list and a watch
    threads = threading.active_count()
    watched.close()
    until(lambda: threading.active_count() == threads - 1, "the end of its thread")
    until(lambda: server.put("pods", pod("a")) and server.watches == 0, "the server to notice")


def restart(server: ApiServer) -> None:
    server.away()
    server.put("pods", pod("b"))
    server.back()


def expire(server: ApiServer) -> None:
    """The token; it is known again after a while."""
    server.token = "new"
    server.compact()
    until(lambda: "401" in str(server.headers) or len(server.requests) > 4, "requests that are refused")
    server.token = TOKEN


FAULTS = {
    "too old (410)": lambda server: server.compact(),
    "too old at once": lambda server: (server.inject("GET", WATCH, Fault("status", 410)), server.compact()),
    "dropped": lambda server: (server.inject("GET", WATCH, Fault("reset")), server.compact()),
    "a proxy's page": lambda server: (server.inject("GET", WATCH, Fault("page", 502)), server.compact()),
    "no list either": lambda server: (server.inject("GET", "/pods", Fault("reset"), 9), server.compact()),
    "the server restarts": restart,
    "the token expires": expire,
}


@pytest.mark.parametrize("case", FAULTS)
def test_nothing_is_missed_when_a_watch_ends(server, watched, case):
    FAULTS[case](server)
    server.put("pods", pod("b"))
    server.put("pods", pod("a", "Running"))
    sees(watched, a="Running", b="Pending")


def test_where_no_watch_gets_through_it_polls(server, api):
    server.inject("GET", WATCH, Fault("status", 403), times=10**6)
    one = Watched(api, "Pod", LABELS, threading.Event())
    sees(one)
    server.put("pods", pod("a"))
    sees(one, a="Pending")
    one.close()


def test_a_connection_that_is_dead_silently_is_given_up(server, api, monkeypatch):
    monkeypatch.setattr(cluster_api, "_SILENCE_SECONDS", 0.2)
    one = Watched(api, "Pod", LABELS, threading.Event())
    until(lambda: server.watches == 1, "the watch")
    server.objects["pods", "a"] = pod("a")  # and nobody is told
    sees(one, a="Pending")
    one.close()


def test_a_gang_costs_a_few_requests_however_long_it_runs(server, api, tmp_path):
    plan, store = plan_of(pipeline_of("quickstart", *QUICKSTART), "train"), FolderStore(tmp_path)
    gang = Gang(store, api, plan)
    jobset = until(
        lambda: next((one for (kind, _), one in server.objects.items() if kind == "jobsets"), None), "it", 10
    )
    until(lambda: server.watches == 2, "both watches")
    before, labels = len(server.requests), jobset["metadata"]["labels"]
    for number in range(100):
        for name in ("a", "b"):
            server.put("pods", pod(name, "Running", labels) | {"number": number})
    outcome = {"outcome": "done", "kind": None, "message": "", "exit_code": 0, "time": 0.0}
    store.put(f"{plan.attempt_key}/outcome.json", json.dumps(outcome).encode())
    status = {"conditions": [{"type": "Completed", "status": "True"}]}
    server.put("jobsets", jobset | {"status": status})
    ended = until(gang.poll, "its end")
    assert ended.state == "done"
    assert server.requests[before:] == []


def test_a_gang_that_is_stopped_has_ended_when_its_last_pod_is_gone(server, api, tmp_path):
    plan, store = plan_of(pipeline_of("quickstart", *QUICKSTART), "train"), FolderStore(tmp_path)
    gang = Gang(store, api, plan)
    jobset = until(
        lambda: next((one for (kind, _), one in server.objects.items() if kind == "jobsets"), None), "it", 10
    )
    name, labels = jobset["metadata"]["name"], jobset["metadata"]["labels"]
    for node in ("a", "b"):
        server.put("pods", pod(node, "Running", labels))
    until(lambda: server.watches == 2, "both watches")
    server.held.add(name)
    gang.terminate()
    until(lambda: any(one.startswith("DELETE") for one in server.requests), "its deletion")
    outcome = {"outcome": "saved", "kind": None, "message": "at step 5", "exit_code": 5, "time": 0.0}
    store.put(f"{plan.attempt_key}/outcome.json", json.dumps(outcome).encode())
    server.drop("pods", "a")
    status = {"conditions": [{"type": "Failed", "status": "True"}]}
    server.put("jobsets", server.objects["jobsets", name] | {"status": status})
    # the second pod still saves
    gang._thread.join(1.0)
    assert gang.poll() is None
    server.drop("pods", "b")
    ended = until(gang.poll, "its end")
    assert (ended.state, ended.exit_code) == ("cancelled", 5)
