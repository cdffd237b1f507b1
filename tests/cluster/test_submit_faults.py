"""What befalls pods, drivers, clients and servers during a training changes nothing in its result. Lost nodes
and hopeless drivers: test_submit_lost.py."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import pytest
from kit import older
from kit.place import ROOT, shortened
from kit.undisturbed import ranks

from mlpipe._core.records import Step
from mlpipe.observe.records import read_records
from mlpipe.train.launcher import RESTARTS_OF_A_GANG

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
AWAY_SECONDS = 8.0  # the length of a fault, not a wait for anything: of more than a checkpoint's four steps


def test_what_no_pod_dies_of_restarts_nothing(place, hold, undisturbed, second):
    """Client killed, driver killed, API server restarted, store away, a node cut off: one after the other.
    Client and driver were of an older version of mlpipe, which is gone when they are; the pods stay of it."""
    with older.Older() as old:
        paths = old.worker_path(ROOT / "tests", ROOT / "tests/kit/shortened")
        spec = place.spec("free", model=hold.model, kubernetes=old.kubernetes, env=paths)
        with hold:
            argv = ["submit", spec, "--to", "kubernetes", "--run-id", "free", "--wait"]
            client = place.start(*argv, **old.environment)
            place.until_step("free", 2)
            assert {label(found) for found in place.objects("jobs,jobsets,pods", "free")} == {older.VERSION}
            old.upgrade()
            client.kill()
            client.wait(10)
            assert len({pod["spec"]["nodeName"] for pod in place.worker_pods("free")}) == 2
            (driver,) = place.objects("pods", "free", **{"app.kubernetes.io/component": "driver"})
            name = driver["metadata"]["name"]
            place.cluster.kubectl("-n", place.namespace, "delete", "pod", name, "--grace-period=0", "--force")
            place.cluster.restart_apiserver()
            place.cluster.stop_minio()
            time.sleep(AWAY_SECONDS)
            place.cluster.start_minio()
            place.cluster.cut_node(second)
            place.cluster.wait_until_node(second, ready=False)
            place.cluster.heal_node(second)
            place.cluster.wait_until_node(second, ready=True)
        place.submit(spec, "free", "--wait")
    undisturbed.check(place, "free")
    assert place.run_state("free").stages["train"].attempt == 1
    (jobset,) = place.objects("jobsets", "free")
    assert (jobset["status"].get("restarts", 0), label(jobset)) == (0, older.VERSION)


def label(found: dict[str, Any]) -> str:
    """The version of mlpipe that made it."""
    return str(found["metadata"]["labels"]["app.kubernetes.io/version"])


def test_what_a_pod_dies_of_restarts_the_gang_and_only_a_crash_counts(place, hold, undisturbed, second):
    """A node is drained, a rank killed with -9 while it starts, a pod deleted."""

    def of_restart(run_id: str, times: int) -> int | None:
        wanted = str(times)
        return next((pid for pid, _, _, env in ranks(run_id) if env["MLPIPE_GANG_RESTART"] == wanted), None)

    def restarted(times: int) -> None:
        """It trains again."""

        def seen() -> bool:
            with place.cluster.inside():
                records = read_records(place.store(), "runs/dies/stages/train/attempt-1", 0)
            return any(
                isinstance(record, Step) and record.restart == RESTARTS_OF_A_GANG * times
                for record in records
            )

        place.until(f"the gang, restarted {times} times", seen)

    def message() -> str:
        return str(place.json("status", "dies")["stages"]["train"]["message"])

    with hold:
        place.submit(undisturbed.spec, "dies")
        place.until_step("dies", 2)
        node = f"node-{second}"
        assert node in {pod["spec"]["nodeName"] for pod in place.worker_pods("dies")}
        (driver,) = place.objects("pods", "dies", **{"app.kubernetes.io/component": "driver"})
        driver_node = driver["spec"]["nodeName"]
        place.cluster.kubectl("drain", node, "--delete-emptydir-data", "--force", timeout=120)
        pid = place.until("a rank of the restarted gang", lambda: of_restart("dies", 1))
        place.cluster.kubectl("uncordon", node)
        os.kill(pid, signal.SIGKILL)
        restarted(2)
        place.until("the word on it", lambda: "restarted 2 times; " in message(), 60)
        pod = place.worker_pods("dies")[0]["metadata"]["name"]
        place.cluster.kubectl("-n", place.namespace, "delete", "pod", pod, "--wait=false")
        restarted(3)
    place.submit(undisturbed.spec, "dies", "--wait")
    undisturbed.check(place, "dies")
    assert place.run_state("dies").stages["train"].attempt == 1
    status = place.objects("jobsets", "dies")[0]["status"]
    # a disruption is free; and so is a pod that somebody deleted, if it could save
    assert (status["restarts"], status["restartsCountTowardsMax"]) == (3, 1)
    # the pods are gone, what befell them is not
    with place.cluster.inside():
        key = "runs/dies/stages/train/attempt-1/postmortem/cluster.json"
        kept = json.loads(place.store().get(key))
    reasons = {one.get("reason") for pod in kept["pods"] for one in pod["status"]["conditions"]}
    print(f"the driver was on {driver_node}; {node} was drained; seen: {reasons}")
    assert "PodFailed" in reasons
    # a driver on the drained node had to leave it as well, and saw nothing meanwhile
    assert driver_node == node or "EvictionByEvictionAPI" in reasons
    assert "k8s/overlays/node-events" in kept["without_node_events"]


def test_an_indexed_job_gets_a_pod_back(place, hold, undisturbed):
    """Without JobSet: a rank is killed with -9; torchrun's rendezvous waits for the pod that comes back. The
    other pod ends with it: nobody tells it to, and the longer it waits, the later comes another."""
    waits = {"mlpipe.store.s3_log:FLUSH_SECONDS": 1.0, "mlpipe.train.launcher:_BLAMELESS_SECONDS": 1.0}
    spec = place.spec("indexed", model=hold.model, kubernetes={"form": "indexed-job"}, env=shortened(waits))
    with hold:
        place.submit(spec, "indexed")
        place.until_step("indexed", 2)
        os.kill(ranks("indexed")[0][0], signal.SIGKILL)
        names = {pod["metadata"]["name"] for pod in place.worker_pods("indexed")}
        place.until(
            "another pod",
            lambda: {pod["metadata"]["name"] for pod in place.worker_pods("indexed")} - names,
        )
    place.submit(spec, "indexed", "--wait")
    undisturbed.check(place, "indexed")
    assert place.objects("jobsets", "indexed") == []
    assert place.run_state("indexed").stages["train"].attempt == 1
