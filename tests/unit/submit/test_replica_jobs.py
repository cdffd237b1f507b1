"""Jobs of an elastic training's replicas, made, deleted and judged; against a stand-in API server."""

from __future__ import annotations

import json

import pytest
from kit.apiserver import ApiServer
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.plan.plan import Replicas
from mlpipe.store import replicas
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.store.preflight import write_slow
from mlpipe.submit import replica_outcomes
from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.kubernetes import replicas as replica_jobs
from mlpipe.submit.kubernetes.executor import KubernetesExecutor

pytestmark = pytest.mark.unit


class Training:
    """Of 2 to 4 replicas; its Jobs are in `server`, whose pods there are none."""

    def __init__(self, folder, server, monkeypatch):
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
        monkeypatch.setattr(replica_jobs, "_LOOK_SECONDS", 0.0)
        monkeypatch.setattr(replica_jobs, "_NOTE_SECONDS", 0.0)
        monkeypatch.setattr(replica_jobs, "_POLL_SECONDS", 0.02)
        self.server, self.store = server, FolderStore(folder / "store")
        self.plan = plan_of(pipeline_of("quickstart", *QUICKSTART, "train.resources.nodes=2..4"), "train")
        self.api = cluster_api.connect()
        self.follow()

    def follow(self):
        self.handle = KubernetesExecutor(self.store, self.api).start(self.plan, None)

    def numbers(self):
        with self.server.lock:
            jobs = [
                body["metadata"]["labels"]
                for (kind, _), body in self.server.objects.items()
                if kind == "jobs"
            ]
        return sorted(int(one["mlpipe.dev/replica"]) for one in jobs if "mlpipe.dev/replica" in one)

    def job(self, number):
        return next(
            body
            for (kind, name), body in self.server.objects.items()
            if kind == "jobs" and name.endswith("a1" if number == "a1" else f"a1-{number}")
        )

    def until(self, *numbers):
        until(lambda: self.numbers() == list(numbers), f"{numbers}, not {self.numbers()}")

    def ends(self, number, condition, **outcome):
        """The Job of a replica."""
        if outcome:
            key = f"{self.plan.attempt_key}/outcome-replica-{number}.json"
            write_outcome(self.store, key, AttemptOutcome(**outcome))
        name = next(
            name for kind, name in self.server.objects if kind == "jobs" and name.endswith(f"-{number}")
        )
        body = self.server.objects["jobs", name]
        status = {"conditions": [{"type": condition, "status": "True"}]}
        self.server.put("jobs", {**body, "status": status})

    def end(self):
        until(lambda: self.handle.poll() is not None, "the end", 60)
        return self.handle.poll()


@pytest.fixture
def training(tmp_path, monkeypatch):
    with ApiServer() as server:
        one = Training(tmp_path, server, monkeypatch)
        one.until(0, 1, 2, 3)
        yield one
        one.handle.terminate()
        until(lambda: one.handle.poll() is not None, "its end", 30)


def test_there_are_as_many_as_are_wanted_whoever_drives(training):
    replicas.want(training.store, training.plan.attempt_key, 2)
    training.until(0, 1)
    training.follow()  # another driver takes over: it makes none that are not wanted
    replicas.want(training.store, training.plan.attempt_key, 3)
    training.until(0, 1, 2)
    assert training.handle.poll() is None


def test_a_lost_node_costs_one_replica_and_another_number_comes(training):
    taint = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    long_ago = {"lastTransitionTime": "2026-01-01T00:00:00Z"}
    job = next(body for (kind, name), body in training.server.objects.items() if name.endswith("a1-1"))
    pod = {
        "metadata": {
            "name": "p",
            "labels": job["metadata"]["labels"],
            "deletionTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"nodeName": "node-1"},
        "status": {"conditions": [{**taint, **long_ago}, {"type": "Ready", "status": "False", **long_ago}]},
    }
    training.server.held.add(job["metadata"]["name"])  # the pod never goes
    training.server.put("pods", pod)
    training.until(0, 2, 3, 4)
    assert training.handle.poll() is None


def test_one_that_hinders_the_others_leaves_and_the_next_stays_off_its_node(training):
    """By its number again, when its pod is gone; also where another driver takes over."""
    jobs = {n: training.job(n) for n in range(4)}
    for number, job in jobs.items():
        metadata = {"name": f"p{number}", "labels": job["metadata"]["labels"]}
        body = {"metadata": metadata, "spec": {"nodeName": f"n{number}"}, "status": {"phase": "Running"}}
        training.server.put("pods", body)
    coordinator = training.job("a1")
    metadata = {"name": "pc", "labels": coordinator["metadata"]["labels"]}
    there = {"metadata": metadata, "spec": {"nodeName": "n1"}, "status": {"phase": "Running"}}
    training.server.put("pods", there)  # which stays
    for number in range(4):
        told = b'{"n1": 1.5}' if number == 1 else b"{}"
        write_slow(training.store, training.plan.attempt_key, told, number)
    training.until(0, 2, 3)  # its pod saves
    training.follow()
    training.server.drop("pods", "p1")
    training.until(0, 1, 2, 3)
    with training.server.lock:
        made = {name for kind, name in training.server.objects if kind == "configmaps"}
    volumes = training.job(1)["spec"]["template"]["spec"]["volumes"]
    assert made >= {one["configMap"]["name"] for one in volumes if "configMap" in one}, made
    assert any("configMap" in one for one in volumes)
    text = json.dumps(training.job(1))
    assert '"key": "metadata.name", "operator": "NotIn", "values": ["n1"]' in text
    assert "NotIn" not in json.dumps(training.job(2))
    said = "no replica shall run on n1: the others were faster without"
    until(lambda: training.handle.note() == said, f"the note, not {training.handle.note()}")
    for name in ("p0", "p2", "p3", "pc"):
        training.server.drop("pods", name)


@pytest.mark.parametrize(
    ("slow", "num_left_out", "expected"),
    [
        ({1: ("b", 1.5)}, 0, None),  # three would take as long as it does
        ({1: ("b", 1.6)}, 0, 1),
        ({1: ("b", 1.6), 2: ("c", 3.0)}, 0, 2),
        ({1: ("b", 1.6)}, 8, None),  # so many machines are not to blame
        ({1: ("z", 9.0), 7: ("a", 9.0)}, 0, None),  # another node's word, and of one that is gone
    ],
)
def test_who_hinders_the_others(slow, num_left_out, expected):
    nodes = {0: "a", 1: "b", 2: "c"}
    slow = dict.fromkeys(nodes) | slow
    if slow[1] is not None and slow[1][0] == "b":
        assert replica_outcomes.hinders({1: slow[1]}, nodes, Replicas(1, 4), 0) is None, (
            "others come only now"
        )
    assert replica_outcomes.hinders(slow, nodes, Replicas(2, 4), num_left_out) == expected
    assert replica_outcomes.hinders(slow, nodes, Replicas(3, 4), num_left_out) is None, "too few are left"


@pytest.mark.parametrize("part", ["", "-2"])
def test_who_waits_for_room_is_told_though_others_run(training, part):
    """The coordinator, or a replica."""
    jobs = {name: body for (kind, name), body in training.server.objects.items() if kind == "jobs"}
    coordinator = next(
        name for name, body in jobs.items() if "mlpipe.dev/replica" not in body["metadata"]["labels"]
    )
    waits = coordinator + part
    labels = {**jobs[coordinator]["metadata"]["labels"], "mlpipe.dev/replica": "7"}
    leaving = {"name": "lost", "labels": labels, "deletionTimestamp": "2999-01-01T00:00:00Z"}
    training.server.put("pods", {"metadata": leaving, "spec": {}, "status": {"phase": "Running"}})
    for name, body in jobs.items():
        if name != waits:
            metadata = {"name": f"pod-of-{name}", "labels": body["metadata"]["labels"]}
            training.server.put("pods", {"metadata": metadata, "spec": {}, "status": {"phase": "Running"}})
    training.server.put("jobs", {**jobs[waits], "spec": {**jobs[waits]["spec"], "suspend": True}})
    said = f"Job {waits} is suspended: its queue has not admitted it"
    expected = said if part else f"without their coordinator the replicas wait: {said}"
    until(lambda: training.handle.note() == expected, f"the note, not {training.handle.note()}")
    for name in jobs.keys() - {waits}:
        training.server.drop("pods", f"pod-of-{name}")
    training.server.drop("pods", "lost")


def test_a_replica_that_fails_for_good_is_given_up_until_too_few_are_left(training):
    fault = {"outcome": "failed", "kind": "failed", "message": "of the user's code", "exit_code": 3}
    for number in (3, 2):
        training.ends(number, "Failed", **fault)
    until(lambda: "given up" in training.handle.note() or training.handle.poll(), "the note")
    assert training.numbers() == [0, 1, 2, 3], "none in its place, which would fail as well"
    training.ends(1, "Failed", **fault)
    ended = training.end()
    assert (ended.state, ended.kind) == ("failed", "failed")
    assert "of the user's code" in ended.message


@pytest.mark.parametrize(
    ("told", "num_failed", "expected"),
    [(None, 0, 4), (3, 0, 3), (3, 1, 3), (3, 2, 2), (1, 0, 2), (9, 0, 4), (None, 3, 1), (2, 5, 0)],
)
def test_failed_ones_cost_no_other_its_place(told, num_failed, expected):
    """Of 2 to 4."""
    assert replica_outcomes.num_wanted(Replicas(2, 4), told, num_failed) == expected


def test_what_the_others_would_come_to_ends_all(training):
    training.ends(0, "Failed", outcome="failed", kind="input", message="no such file", exit_code=2)
    ended = training.end()
    assert (ended.state, ended.kind) == ("failed", "input")
    until(lambda: training.numbers() == [0], "the end of the others")


def test_one_that_has_done_it_is_the_end(training, monkeypatch):
    monkeypatch.setattr(replica_jobs, "_OTHERS_SECONDS", 0.0)
    training.ends(1, "Complete", outcome="done", step=150)
    assert training.end().state == "done"
    assert training.numbers() == [1], "others that came late have nothing to do"


def test_a_coordinator_that_ends_before_who_has_done_it_is_no_failure(training, monkeypatch):
    monkeypatch.setattr(replica_jobs, "_OTHERS_SECONDS", 0.0)
    key = f"{training.plan.attempt_key}/outcome-replica-1.json"
    write_outcome(training.store, key, AttemptOutcome("done", step=150))
    training.ends("a1", "Complete")
    assert training.end().state == "done"


def test_a_stop_is_of_the_replicas_first(training):
    write_outcome(
        training.store,
        f"{training.plan.attempt_key}/outcome-replica-2.json",
        AttemptOutcome("saved", step=40, exit_code=5),
    )
    training.handle.terminate()
    assert training.end().state == "cancelled"
    deleted = [one.rpartition("/")[2] for one in training.server.requests if one.startswith("DELETE")]
    assert deleted[-1].startswith(training.plan.run_id), deleted
    assert not deleted[-1].partition("?")[0].endswith(tuple(f"a1-{n}" for n in range(4))), (
        "the coordinator's last"
    )
