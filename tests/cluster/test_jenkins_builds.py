"""From a trigger to a model by way of a build, on the real cluster: the client, the stand-in's queue, the
repository's Jenkinsfile on Jenkins' CPS engine with real `sh`, `mlpipe submit --to kubernetes`, pods that
train. One run whose figures are told; one whose agent and whose controller are killed; one that is
aborted."""

from __future__ import annotations

import json
import os
import time

import pytest
from kit import groovy
from kit.builds import controller
from kit.cluster_process import NO_PROXY
from kit.place import STEPS
from kit.servers import ServerMissingError

from benchmarks import measure
from mlpipe._core.records import Step
from mlpipe.observe.records import read_records
from mlpipe.store import catalogue, runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
TRAIN = "stages/train/attempt-1"
SLOW_STEPS = 200


@pytest.fixture(scope="module")
def jenkins(place, tmp_path_factory):
    try:
        groovy.build()
    except ServerMissingError as error:
        pytest.skip(str(error))
    folder, environment = tmp_path_factory.mktemp("jenkins"), {**place.environment, **NO_PROXY}
    # the module's tests stay in the cluster's network, where its store and its API server are
    with place.cluster.inside(), controller(folder, environment, "kubernetes") as one:
        yield one


def events(place, run_id: str) -> dict[str, float]:
    """The first of each kind, Unix seconds."""
    with place.cluster.inside():
        store = place.store()
        prefix = f"runs/{run_id}/{TRAIN}/events.jsonl"
        text = b"".join(store.get(info.key) for info in store.list(prefix))
    lines = [json.loads(line) for line in text.splitlines()]
    return {line["kind"]: line["time"] for line in reversed(lines)}


def steps(place, run_id: str) -> list[tuple[int, float]]:
    with place.cluster.inside():
        found = read_records(place.store(), f"runs/{run_id}/{TRAIN}", 0)
    return [(record.step, record.time) for record in found if isinstance(record, Step)]


def slow(hold):
    """A training of one pod that outlasts two builds, until it is released."""
    return {"model": hold.model, "nodes": 1, "steps": SLOW_STEPS, "checkpoint": {"every": "1000 steps"}}


def check_one_gang(place, run_id: str) -> None:
    """One JobSet that never restarted (a cancelled run has none left); one attempt, in which each step was
    taken once."""
    found = place.objects("jobsets", run_id)
    assert [jobset["status"].get("restarts", 0) for jobset in found] in ([], [0])
    assert place.run_state(run_id).stages["train"].attempt == 1
    taken = [step for step, _ in steps(place, run_id)]
    assert taken == list(range(1, len(taken) + 1))


def test_a_trigger_becomes_a_build_a_gang_and_a_report(place, jenkins, tmp_path):
    spec = place.spec("jenkins", model={"entry": "kit.models:slow", "args": {"seconds": 0.0}})
    load, asked = os.getloadavg()[0], time.time()
    client = jenkins.submit(spec, "built")
    assert jenkins.ended(client) == 0, (jenkins.folder / "client-built.log").read_text()
    ended = time.time()
    (building,) = jenkins.builds
    assert building.ran is not None
    assert ("Train", "SUCCESS") in building.ran.stages
    assert "junit 1 tests, 0 failed" in building.ran.events
    report = building.folder / "archived-report.html"
    assert "<html" in report.read_text()
    check_one_gang(place, "built")
    taken, began = steps(place, "built"), events(place, "built")
    assert len(taken) == STEPS
    after = {
        "in the queue": jenkins.queued[0],
        "build started": building.began,
        "run created": place.run_state("built").created,
        "gang submitted": began["submitted"],
        "first pod runs its launcher": began["launched"],
        "first step done": taken[0][1],
        "last step done": taken[-1][1],
        "report archived": report.stat().st_mtime,
        "client has exited": ended,
    }
    assert list(after.values()) == sorted(after.values())
    work = "from a trigger to a report, on a cluster"
    figures = [measure.alone(work, name, "s after the call", [at - asked]) for name, at in after.items()]
    body = measure.document(figures, load_before=load, steps=STEPS, pods=2)
    print(measure.table(body))
    measure.write("jenkins", body, measure.RESULTS if os.environ.get("MLPIPE_UPDATE_RESULTS") else tmp_path)


def test_an_agent_that_is_killed_and_a_controller_that_restarts_adopt_the_run(place, jenkins, hold):
    spec = place.spec("adopted", **slow(hold))
    before = len(jenkins.builds)
    with hold:
        first = jenkins.submit(spec, "adopted")
        place.until_step("adopted", 2)
        jenkins.builds[-1].kill_agent()
        assert jenkins.ended(first) == 3  # as its build: a failure, but the run goes on
        second = jenkins.submit(spec, "adopted")
        building = jenkins.build(before + 2)
        place.until("the second agent", building.agents)
        building.kill_controller()
        place.until("the agent of the restarted controller", lambda: len(building.agents()) == 2)
    assert jenkins.ended(second) == 0, building.log()
    assert len(jenkins.builds) == before + 2
    check_one_gang(place, "adopted")
    assert len(steps(place, "adopted")) == SLOW_STEPS
    assert place.run_state("adopted").state == "done"


def test_a_build_that_is_aborted_leaves_a_checkpoint_and_no_pod(place, jenkins, hold):
    spec = place.spec("aborted", **slow(hold))
    with hold:
        client = jenkins.submit(spec, "aborted")
        place.until_step("aborted", 2)
        building = jenkins.builds[-1]
        building.abort()
        assert jenkins.ended(client) == 5, building.log()
    assert building.ran is not None
    assert building.ran.stages[-1] == ("Train", "ABORTED")
    assert "train is saved at step" in building.log()
    with place.cluster.inside():
        store = place.store()
        assert runs.read_run(store, "aborted").state == "cancelled"
        saved = catalogue.latest(store, "runs/aborted/stages/train")
    assert saved is not None
    assert saved.step >= 2
    # the driver's pod, which bears the stage's name as well, stays for its words
    assert place.objects("pods", "aborted", **{"app.kubernetes.io/component": "worker"}) == []
    check_one_gang(place, "aborted")
