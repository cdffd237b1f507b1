"""A node that is lost for good, and drivers that are cut off from the API server, killed, or hopeless."""

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
from kit.place import quick_driver

from mlpipe.store import runs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
# less patience than drivers have: for a lost node's pod, for the API server
QUICK = quick_driver(
    {
        "mlpipe.submit.kubernetes.gang:_LOST_SECONDS": 3.0,
        "mlpipe.submit.kubernetes.api:DEADLINE_SECONDS": 8.0,
        "mlpipe.submit.kubernetes.api:_REQUEST_SECONDS": 4.0,
    }
)
FROZEN_SECONDS = 12.0  # longer than a request is repeated


def test_a_node_that_is_lost_for_good_is_given_up(place, hold, undisturbed, second):
    """With a gang's pod on it, and a command."""
    short = {"operator": "Exists", "effect": "NoExecute", "toleration_seconds": 3}
    tolerations = [{"key": f"node.kubernetes.io/{state}", **short} for state in ("unreachable", "not-ready")]
    spec = place.spec("lost", model=hold.model, kubernetes={"tolerations": tolerations, "patches": [QUICK]})
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
    jobs = place.objects("jobs", "command", **{"mlpipe.dev/stage": "train"})
    attempts = [job["metadata"]["labels"]["mlpipe.dev/attempt"] for job in jobs]
    assert attempts == ["2"], "none waits for the lost pod"
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
            for_long = replace(old, expires=old.expires + 3000)
            runs.update_run(place.store(), "frozen", lambda run: replace(run, driver=for_long))
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
            if argv[1:6] == ["-P", "-m", "mlpipe.cli", "resume", run_id] and "--here" in argv:
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
    cluster = {"tolerations": tolerations, "patches": [patch, QUICK]}
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
