"""What befalls pods, nodes, drivers, clients and servers during a training changes nothing in its result."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import older
from kit.place import ROOT
from kit.undisturbed import ranks

from mlpipe._core.records import Step
from mlpipe.observe.records import read_records
from mlpipe.store import runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
AWAY_SECONDS = 20.0  # the length of a fault, not a wait for anything
CUT_SECONDS = 30.0
FROZEN_SECONDS = 70.0  # longer than a request is repeated


def test_what_no_pod_dies_of_restarts_nothing(place, hold, undisturbed, second):
    """Client killed, driver killed, API server restarted, store away, a node cut off: one after the other.
    Client and driver were of an older version of mlpipe, which is gone when they are; the pods stay of it."""
    with older.Older() as old:
        paths = old.worker_path(ROOT / "tests")
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
            time.sleep(CUT_SECONDS)
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
            return any(isinstance(record, Step) and record.restart == times for record in records)

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
    """Without JobSet: a rank is killed with -9; torchrun's rendezvous waits for the pod that comes back."""
    spec = place.spec("indexed", model=hold.model, kubernetes={"form": "indexed-job"})
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


def test_a_node_that_is_lost_for_good_is_given_up(place, hold, undisturbed, second):
    """With a gang's pod on it, and a command. The last test here: the cluster has a dead node afterwards."""
    short = {"operator": "Exists", "effect": "NoExecute", "toleration_seconds": 3}
    tolerations = [{"key": f"node.kubernetes.io/{state}", **short} for state in ("unreachable", "not-ready")]
    spec = place.spec("lost", model=hold.model, kubernetes={"tolerations": tolerations})
    command = lost_command(place, hold, tolerations, f"node-{second}")
    with hold:
        place.submit(spec, "lost")
        place.submit(command, "command")
        place.until_step("lost", 6)
        nodes = [pod["spec"]["nodeName"] for pod in place.worker_pods("lost")]
        assert len(set(nodes)) == 2, nodes
        (pod,) = place.until("the command's pod", lambda: running(place.worker_pods("command")))
        assert pod["spec"]["nodeName"] == f"node-{second}"
        place.cluster.kill_node(second)
    place.submit(spec, "lost", "--wait")
    undisturbed.check(place, "lost", records_lost=True)
    place.submit(command, "command", "--wait")
    assert place.run_state("command").stages["train"].attempt == 2
    # Either JobSet could restart the gang, or its attempt was given up and fenced, and the next one went on.
    with place.cluster.inside():
        keys = [info.key for info in place.store().list("runs/lost/stages/train/checkpoints")]
        outputs = [info.key for info in place.store().list("runs/command/stages/train/outputs")]
    attempt = place.run_state("lost").stages["train"].attempt
    assert any("/fence-1-" in key for key in keys) == (attempt == 2)
    assert "fence-1" in {key.rpartition("/")[2] for key in outputs}
    place.cluster.kubectl("delete", "node", f"node-{second}")


def test_a_driver_that_is_cut_off_killed_or_hopeless(place, hold):
    """The API server is frozen when the driver is about to create its stage; then the driver is killed, and
    could not wait for its lease; another one can do nothing with what it reads."""
    place.cluster.wait_until_node(0, ready=True)
    spec = lost_command(place, hold, [], "node-0")
    with hold:
        place.submit(spec, "frozen")
        place.until("its driver", lambda: drivers("frozen"))
        os.kill(place.cluster.control.apiserver.pid, signal.SIGSTOP)
        try:
            time.sleep(FROZEN_SECONDS)
        finally:
            os.kill(place.cluster.control.apiserver.pid, signal.SIGCONT)
        place.until("the command's pod", lambda: running(place.worker_pods("frozen")))
        with place.cluster.inside():
            old = runs.read_run(place.store(), "frozen").driver
            os.kill(drivers("frozen")[0], signal.SIGKILL)
            for_ever = replace(old, expires=old.expires + 1e9)
            runs.update_run(place.store(), "frozen", lambda run: replace(run, driver=for_ever))
        place.until("another driver", lambda: place.run_state("frozen").driver.holder != old.holder)
    place.submit(spec, "frozen", "--wait")
    assert place.run_state("frozen").stages["train"].attempt == 1
    nodes = [node["metadata"]["name"] for node in place.cluster.get("/api/v1/nodes")["items"]]
    place.cluster.kubectl("cordon", *nodes)
    place.submit(spec, "hopeless")
    with place.cluster.inside():
        place.store().put("runs/hopeless/pipeline.yaml", b"version: none")
    place.cluster.kubectl("uncordon", *nodes)

    def told() -> bool:
        return "it ended for good: pod hopeless-driver" in place.mlpipe("status", "hopeless").stdout

    place.until("the end of the driver's Job", told)
    (pod,) = place.objects("pods", "hopeless")
    (container,) = pod["status"]["containerStatuses"]
    assert container["state"]["terminated"]["exitCode"] == 2
    place.mlpipe("cancel", "hopeless")


def drivers(run_id: str) -> list[int]:
    """Processes of drivers of a run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            argv = path.read_text().split("\0")
            if argv[1:5] == ["-m", "mlpipe.cli", "resume", run_id] and "--here" in argv:
                found.append(int(path.parent.name))
    return found


def running(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [pod for pod in pods if pod["status"]["phase"] == "Running"]


def lost_command(place: Any, hold: Any, tolerations: list[dict[str, Any]], node: str) -> Path:
    """A pipeline whose one stage runs on `node`, if that is there, for as long as trainings are held."""
    term = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [term]}}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    patch = {
        "target": {"kind": "Pod", "component": "worker"},
        "strategic": {"spec": {"affinity": affinity}},
    }
    cluster = {"tolerations": tolerations, "patches": [patch]}
    path: Path = place.spec("command", model=hold.model, kubernetes=cluster)
    document = json.loads(path.read_text())
    waits = 'while [ -e "$0" ]; do sleep 0.2; done; echo done > "$MLPIPE_OUTPUT/word"'
    document["stages"] = [
        {
            "name": "train",
            "command": ["sh", "-c", waits, str(hold.path)],
            "resources": {"cpus": 0.1, "memory": "1 GiB"},
        }
    ]
    path.write_text(json.dumps(document))
    return path
