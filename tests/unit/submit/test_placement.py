"""Gangs that no queue places: all of one or nothing, without deadlock, whatever the scheduler does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe.render.kubernetes import stage_objects
from mlpipe.render.prepull import prepull_objects
from mlpipe.submit.kubernetes import placement
from mlpipe.submit.kubernetes.api import ApiError
from mlpipe.submit.kubernetes.placement import (
    PATIENCE_SECONDS,
    SETTLE_SECONDS,
    YIELDED,
    Standing,
    WholePlacement,
    must_yield,
)

pytestmark = pytest.mark.unit
Json = dict[str, Any]
TICK = 60.0  # seconds


@dataclass
class Cluster:
    """A made-up API server with a scheduler of its own: places pods one by one, in the order that it is told.
    `free`: nodes. Each gang has a namespace, and sees only that one's."""

    free: int
    draw: random.Random
    now: float = 0.0
    gangs: dict[str, Json] = field(default_factory=dict)
    pods: dict[str, list[Json]] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)  # ticks of work
    waits: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, namespace: str, wanted: int, ticks: int, kind: str) -> None:
        job: Json = {"completions": wanted, "parallelism": wanted}
        nested = {"replicatedJobs": [{"template": {"spec": job}}]}
        labels = {"mlpipe.dev/run": name, "mlpipe.dev/stage": "train", "mlpipe.dev/attempt": "1"}
        metadata = {"name": name, "uid": name, "namespace": namespace, "labels": labels, "annotations": {}}
        metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"  # at once: the uid decides
        self.gangs[name] = {"kind": kind, "metadata": metadata, "spec": job if kind == "Job" else nested}
        self.left[name] = ticks
        self.pods[name] = []

    def tick(self) -> None:
        """Controllers, scheduler and time; what is placed whole works, and ends."""
        self.now += TICK
        for name, gang in self.gangs.items():
            if gang["spec"].get("suspend"):
                self.free += sum("nodeName" in pod["spec"] for pod in self.pods[name])
                self.pods[name] = []
            elif self.left[name] and not self.pods[name]:
                labels, count = gang["metadata"]["labels"], placement.num_pods(gang)
                self.pods[name] = [{"metadata": {"labels": labels}, "spec": {}} for _ in range(count)]
        waiting = [pod for pods in self.pods.values() for pod in pods if "nodeName" not in pod["spec"]]
        self.draw.shuffle(waiting)
        for pod in waiting:
            if self.free:
                self.free -= 1
                pod["spec"]["nodeName"] = "n"
                pod["status"] = {"conditions": [{"type": "PodScheduled", "status": "True"}]}
            else:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                pod["status"] = {"conditions": [condition]}
        for name, pods in self.pods.items():
            if pods and all("nodeName" in pod["spec"] for pod in pods):
                self.left[name] -= 1
                if not self.left[name]:
                    self.free += len(pods)
                    self.pods[name] = []
                    self.gangs[name]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}


@dataclass
class Api:
    """Of one namespace."""

    cluster: Cluster
    namespace: str

    def list(self, kind: str, labels: Json) -> list[Json]:
        own = {n for n, g in self.cluster.gangs.items() if g["metadata"]["namespace"] == self.namespace}
        if kind == "Pod":
            return [pod for name in own for pod in self.cluster.pods[name]]
        found = [self.cluster.gangs[name] for name in own if self.cluster.gangs[name]["kind"] == kind]
        return [{key: value for key, value in gang.items() if key != "kind"} for gang in found]

    def patch(self, kind: str, name: str, body: Json) -> None:
        gang = self.cluster.gangs[name]
        gang["spec"] |= body["spec"]
        gang["metadata"]["annotations"] |= body.get("metadata", {}).get("annotations", {})


def run(cluster: Cluster, ticks: int) -> dict[str, int]:
    """The work that is left of each gang that has not ended by then."""
    followers = {
        name: WholePlacement(Api(cluster, gang["metadata"]["namespace"]), random.Random(name))  # type: ignore[arg-type]
        for name, gang in cluster.gangs.items()
    }
    for _ in range(ticks):
        if not any(cluster.left.values()):
            break
        cluster.tick()
        for name, follower in followers.items():
            follower.look(cluster.gangs[name], cluster.pods[name], cluster.now)
    return {name: left for name, left in cluster.left.items() if left}


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(5, [(4, "b", 12), (4, "a", 3), (6, "b", 11), (5, "b", 1), (6, "a", 1)], 267670)
@given(
    st.integers(2, 6),
    st.lists(st.tuples(st.integers(2, 6), st.sampled_from("ab"), st.integers(1, 20)), min_size=2, max_size=6),
    st.integers(0, 2**32),
)
def test_gangs_that_each_fit_alone_all_end(nodes: int, gangs: list[tuple[int, str, int]], seed: int) -> None:
    cluster = Cluster(nodes, random.Random(seed))
    for number, (wanted, namespace, ticks) in enumerate(gangs):
        cluster.add(f"g{number}", namespace, min(wanted, nodes), ticks, ("Job", "JobSet")[number % 2])
    assert run(cluster, 3000) == {}
    assert cluster.free == nodes


def half_and_half(namespaces: str = "aa") -> Cluster:
    """Two gangs of two pods on two nodes, each of which has one."""
    cluster = Cluster(2, random.Random(0))
    for name, namespace in zip(("old", "young"), namespaces, strict=True):
        cluster.add(name, namespace, 2, 3, "JobSet")
    cluster.draw.shuffle = lambda pods: pods.sort(key=lambda pod: id(pod) % 7)  # type: ignore[method-assign]
    for pods in cluster.pods.values():
        pods.clear()
    cluster.tick()
    for number, name in enumerate(cluster.gangs):
        for place, pod in enumerate(cluster.pods[name]):
            pod["spec"] = {"nodeName": f"n{number}"} if place == 0 else {}
            held = {"type": "PodScheduled", "status": "True"}
            none = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
            pod["status"] = {"conditions": [held if place == 0 else none]}
    cluster.free = 0
    cluster.left = {"old": 3, "young": 3}
    return cluster


def test_without_it_two_half_placed_gangs_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "must_yield", lambda *_: False)
    assert run(half_and_half(), 600) == {"old": 3, "young": 3}


def test_the_younger_one_gives_way_and_comes_back() -> None:
    cluster = half_and_half()
    assert run(cluster, 30) == {}
    given_back = {name: gang["metadata"]["annotations"] for name, gang in cluster.gangs.items()}
    assert given_back == {"old": {}, "young": {YIELDED: "1"}}


def test_of_namespaces_that_do_not_see_each_other_somebody_loses_patience() -> None:
    cluster = half_and_half("ab")
    assert run(cluster, int(PATIENCE_SECONDS / TICK) - 1) == {"old": 3, "young": 3}
    assert run(cluster, 600) == {}


def test_a_driver_that_takes_over_takes_the_gang_up_again() -> None:
    cluster = half_and_half()
    api = Api(cluster, "a")
    gang = cluster.gangs["young"]
    gang["spec"]["suspend"], gang["metadata"]["annotations"][YIELDED] = True, "2"
    cluster.tick()
    cluster.left["old"], cluster.pods["old"] = 0, []
    follower = WholePlacement(api, random.Random(1))  # type: ignore[arg-type]
    assert "has given its nodes back" in follower.look(gang, [], 1000.0)
    assert follower.look(gang, [], 1000.0 + SETTLE_SECONDS - 1) != ""
    assert follower.look(gang, [], 1000.0 + 2 * SETTLE_SECONDS) == ""
    assert (gang["spec"]["suspend"], gang["metadata"]["annotations"]) == (False, {YIELDED: "2"})


def test_a_driver_without_the_right_says_so_and_goes_on() -> None:
    cluster = half_and_half()
    api = Api(cluster, "a")

    def refuse(*_: object) -> None:
        raise ApiError("you may not change JobSet young", status=403, kind="input")

    api.patch = refuse  # type: ignore[method-assign]
    follower = WholePlacement(api, random.Random(1))  # type: ignore[arg-type]
    words = [follower.look(cluster.gangs["young"], cluster.pods["young"], now) for now in (1e3, 2e3, 3e3)]
    assert words[0] == ""
    assert all("1 of its 2 pods have nodes, and its driver may not" in one for one in words[1:])


def test_pods_that_are_ended_need_no_grace_to_save() -> None:
    cluster = half_and_half()
    deleted: list[tuple[str, int]] = []
    api = Api(cluster, "a")
    api.delete = lambda kind, name, grace_seconds: deleted.append((name, grace_seconds))  # type: ignore[attr-defined]
    gang = cluster.gangs["young"]
    gang["spec"]["suspend"], gang["metadata"]["annotations"][YIELDED] = True, "1"
    follower = WholePlacement(api, random.Random(1))  # type: ignore[arg-type]
    going = {"name": "b", "deletionTimestamp": "", "deletionGracePeriodSeconds": 630}
    gone = {"name": "c", "deletionTimestamp": "", "deletionGracePeriodSeconds": 10}
    follower.look(gang, [{"metadata": one} for one in ({"name": "a"}, going, gone)], 0.0)
    assert deleted == [("b", 10)]


def test_nobody_makes_room_for_what_fetches_an_image() -> None:
    """An older Job of which one pod has had its node, and another one finds none."""
    cluster = half_and_half()
    pipeline = pipeline_of("llm", "kubernetes.prepull=true")
    (job,) = prepull_objects([plan_of(pipeline, one.name) for one in pipeline.stages], ["train"], "")
    older = cluster.gangs["old"]
    older["kind"], older["spec"] = job["kind"], job["spec"]
    older["metadata"]["labels"] = job["metadata"]["labels"]
    for pod in cluster.pods["old"]:
        pod["metadata"] = job["spec"]["template"]["metadata"]
    follower = WholePlacement(Api(cluster, "a"), random.Random(1))  # type: ignore[arg-type]
    for now in (SETTLE_SECONDS, 2 * SETTLE_SECONDS + 1, PATIENCE_SECONDS):
        assert follower.look(cluster.gangs["young"], cluster.pods["young"], now) == ""
    assert "suspend" not in cluster.gangs["young"]["spec"]


def test_what_somebody_else_suspended_stays_so() -> None:
    cluster = half_and_half()
    cluster.gangs["young"]["spec"]["suspend"] = True
    follower = WholePlacement(Api(cluster, "a"), random.Random(1))  # type: ignore[arg-type]
    for now in (0.0, 1e4, 2e4):
        assert follower.look(cluster.gangs["young"], [], now) == ""
    assert cluster.gangs["young"]["spec"]["suspend"] is True


def test_when_a_gang_gives_its_nodes_back() -> None:
    own = Standing(("b", ""), wanted=4, bound=2, unschedulable=1)
    older, younger = (Standing((age, ""), wanted=4, bound=1, unschedulable=3) for age in "ac")
    unplaced = Standing(("a", ""), wanted=4, bound=0, unschedulable=4)
    whole = Standing(("a", ""), wanted=4, bound=4, unschedulable=0)
    assert must_yield(own, [older], SETTLE_SECONDS, 600)
    assert not must_yield(own, [older], SETTLE_SECONDS - 1, 600)
    assert not must_yield(own, [younger, unplaced, whole], 599, 600)
    assert must_yield(own, [younger], 600, 600)
    starting = Standing(("b", ""), wanted=4, bound=2, unschedulable=0)  # the scheduler is not through yet
    assert not must_yield(starting, [older], 1e6, 600)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), True),
        (("kubernetes.queue=q",), False),
        (("kubernetes.volcano_queue=q",), False),
        (("train.resources.nodes=1",), False),
        (("train.resources.nodes=2..3",), False),
    ],
)
def test_who_is_placed_by_a_queue_is_left_to_it(overrides: tuple[str, ...], expected: bool) -> None:
    two = "train.resources.nodes=2"
    assert (
        WholePlacement.is_for(plan_of(pipeline_of("quickstart", *QUICKSTART, two, *overrides), "train"))
        == expected
    )


@pytest.mark.parametrize("form", ["jobset", "indexed-job"])
def test_the_number_of_pods_is_that_of_what_is_rendered(form: str) -> None:
    overrides = ("train.resources.nodes=4", f"kubernetes.form={form}")
    gang = stage_objects(plan_of(pipeline_of("quickstart", *QUICKSTART, *overrides), "train"))[-1]
    assert placement.num_pods(gang) == 4
