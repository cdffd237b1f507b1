"""What befell pods is kept before the cluster forgets it, said by the status, and told when all is over."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.submit.kubernetes.gang import Gang
from mlpipe.submit.kubernetes.postmortem import Postmortem, last_line, termination_reason

pytestmark = pytest.mark.unit
PLAN = plan_of(pipeline_of("quickstart", *QUICKSTART), "train")
KEY = f"{PLAN.attempt_key}/postmortem/cluster.json"


def pod(name: str, phase: str, **status: object) -> dict:
    metadata = {"name": name, "uid": name, "labels": {}}
    return {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": phase, **status}}


def ended(code: int, reason: str = "Error", message: str = "") -> list[dict]:
    return [
        {"name": "worker", "state": {"terminated": {"exitCode": code, "reason": reason, "message": message}}}
    ]


def event(server, kind: str, name: str, reason: str) -> None:
    body = {"involvedObject": {"kind": kind, "name": name}, "reason": reason, "message": f"{reason}!"}
    server.put("events", {"metadata": {"name": f"{name}.{reason}"}, **body})


def kept(store) -> dict:
    return json.loads(store.get(KEY))


def test_a_gang_that_restarts_says_since_when_and_keeps_what_its_pods_take_along(
    server, api, tmp_path, monkeypatch
):
    monkeypatch.setattr("mlpipe.submit.kubernetes.gang._NOTE_SECONDS", 0.0)
    store = FolderStore(tmp_path)
    gang = Gang(store, api, PLAN)
    jobset = until(
        lambda: next((one for key, one in server.objects.items() if key[0] == "jobsets"), None), "", 9
    )
    labels = jobset["metadata"]["labels"]
    event(server, "Pod", "w-0", "Killing")
    event(server, "Pod", "other", "Killing")
    event(server, "Node", "n1", "SystemOOM")
    fallen = pod("w-0", "Failed", containerStatuses=ended(137, "OOMKilled"))
    server.put("pods", {**fallen, "metadata": {**fallen["metadata"], "labels": labels}})
    until(lambda: store.exists(KEY), "the post-mortem")
    server.drop("pods", "w-0")
    again = pod("w-1", "Running")
    for name in ("w-1", "w-2"):
        server.put("pods", {**again, "metadata": {"name": name, "uid": name, "labels": labels}})
    server.put("jobsets", {**jobset, "status": {"restarts": 1}})
    until(lambda: gang.note() == "restarted once; pod w-0 ran out of memory (OOMKilled)", "the note")
    for name in ("w-1", "w-2"):
        server.drop("pods", name)
    conditions = [{"type": "Failed", "status": "True"}]
    server.put("jobsets", {**jobset, "status": {"restarts": 1, "conditions": conditions}})
    result = until(gang.poll, "its end")
    assert result.message.endswith("failed: pod w-0 ran out of memory (OOMKilled)")
    found = kept(store)
    assert [one["name"] for one in found["pods"]] == ["w-0"]
    assert [one["involvedObject"]["name"] for one in found["events"]] == ["w-0"]
    assert [one["reason"] for one in found["node_events"]] == ["SystemOOM"]
    assert found["without_node_events"] is None


@pytest.mark.parametrize("code", [137, 5])
def test_one_that_was_stopped_does_not_speak_for_one_that_left_no_outcome(server, api, tmp_path, code):
    """Of a command gang that nobody of us stopped; 5: it was stopped, too, and nobody knows more."""
    store = FolderStore(tmp_path)
    stopped = AttemptOutcome("failed", kind="cancelled", message="stopped", exit_code=5)
    write_outcome(store, f"{PLAN.attempt_key}/outcome.json", stopped)
    gang = Gang(store, api, PLAN)
    jobset = until(
        lambda: next((one for key, one in server.objects.items() if key[0] == "jobsets"), None), "", 9
    )
    fallen = pod("w-1", "Failed", containerStatuses=ended(code))
    fallen["metadata"]["labels"] = jobset["metadata"]["labels"]
    server.put("pods", fallen)
    server.put("jobsets", {**jobset, "status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    result = until(gang.poll, "its end")
    if code == 5:
        assert (result.state, result.message) == ("cancelled", "stopped")
    else:
        assert (result.state, result.kind) == ("failed", "infrastructure")
        assert result.message.endswith("failed: pod w-1 ended with exit code 137")


def test_without_the_right_to_read_them_it_says_that_node_events_are_missing(server, api, tmp_path):
    server.denied.add("list events")
    store = FolderStore(tmp_path)
    post = Postmortem(store, api, PLAN.attempt_key, "g")
    monkey = api.list
    api.list = lambda kind: [] if kind == "Event" else monkey(kind)  # its own namespace's it may read
    post.look([pod("a", "Failed", containerStatuses=ended(1, message="x\nerror: no such thing\n"))])
    assert "k8s/overlays/node-events" in kept(store)["without_node_events"]
    assert post.last == "pod a ended with exit code 1: no such thing"


def test_a_driver_that_takes_over_goes_on_with_what_is_there(server, api, tmp_path):
    store = FolderStore(tmp_path)
    Postmortem(store, api, PLAN.attempt_key, "g").look([pod("a", "Failed")])
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    second = Postmortem(store, api, PLAN.attempt_key, "g")
    second.look([pod("b", "Running", conditions=disrupted), pod("c", "Running")])
    second.look([pod("b", "Failed", conditions=disrupted, containerStatuses=ended(5))])
    found = {one["name"]: one["status"]["phase"] for one in kept(store)["pods"]}
    assert found == {"a": "Failed", "b": "Failed"}
    assert second.last == "pod b was disrupted: EvictionByEvictionAPI"
    before = len(server.requests)
    second.look([pod("b", "Failed", conditions=disrupted), pod("c", "Running")])
    assert len(server.requests) == before


def test_what_cannot_be_written_stops_nothing(server, api, tmp_path):
    server.away()
    store = FolderStore(tmp_path)
    Postmortem(store, api, PLAN.attempt_key, "g").look([pod("a", "Failed")])
    assert not store.exists(KEY)


@pytest.mark.parametrize(
    ("text", "line"),
    [("", ""), ("a\nb\n\n", "b"), ("error: one\nTraceback\nerror: two\nthree", "two")],
)
def test_last_line(text, line):
    assert last_line(text) == line


@pytest.mark.parametrize(
    "words",
    [
        'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi". ',
        "Pod ephemeral local storage usage exceeds the total limit of containers 64Gi. ",
        'Container worker exceeded its local ephemeral storage limit "1Gi". ',
    ],
)
def test_a_pod_that_took_too_much_disk_says_what_to_raise(words):
    reason = termination_reason([pod("w-0", "Failed", reason="Evicted", message=words)])
    assert reason.message.startswith(f"pod w-0: Evicted: {words[:20]}")
    assert reason.message.endswith("hint: raise `resources.disk` of the stage, or write to a volume")
    low = pod("w-0", "Failed", reason="Evicted", message="The node was low on memory")
    assert "hint" not in termination_reason([low]).message


def test_of_nodes_that_hang_the_one_that_did_not_only_wait_is_told(server, api, tmp_path):
    """Though it spoke last: a rank that waits for the others notices first and knows least."""
    store = FolderStore(tmp_path)
    launch = PLAN.launch._replace(num_nodes=3)
    told = {"outcome": "failed", "kind": "failed", "where": None, "hint": None, "exit_code": 3}
    for name, time, more in (
        ("outcome", 1.0, {"waiting": ["all_reduce"]}),
        ("outcome-node-1", 3.0, {}),
        ("outcome-node-2", 2.0, {"waiting": ["all_reduce"]}),
    ):
        body = {**told, "message": f"{name} hangs", "time": time, **more}
        store.put(f"{PLAN.attempt_key}/{name}.json", json.dumps(body).encode())
    gang = Gang(store, api, replace(PLAN, launch=launch))
    made = until(lambda: [one for key, one in server.objects.items() if key[0] == "jobsets"], "")
    server.put("jobsets", {**made[0], "status": {"conditions": [{"type": "Failed", "status": "True"}]}})
    assert until(gang.poll, "its end").message == "outcome-node-1 hangs"
