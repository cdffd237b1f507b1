"""Two gangs that would each fit alone, and hold half of a real cluster's places each: both end."""

from __future__ import annotations

import contextlib
import json
import time
from datetime import datetime
from pathlib import Path

import pytest
from kit.run_ids import claim
from kit.undisturbed import TORCHRUN

from mlpipe.plan.ahead import plan_ahead
from mlpipe.spec.load import load_pipeline
from mlpipe.submit.kubernetes import placement
from mlpipe.submit.kubernetes.api import connect
from mlpipe.submit.kubernetes.gang import Gang

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PLACE, TAINT = "mlpipe.test/place", "mlpipe.test/young"


def offer(cluster, count: int) -> None:
    """So many places for pods on the node: an extended resource with nothing behind it."""
    status = {"status": {"capacity": {PLACE: str(count)}, "allocatable": {PLACE: str(count)}}}
    cluster.kubectl(
        "patch", "node", "node-0", "--subresource=status", "--type=merge", "-p", json.dumps(status)
    )


def bound(place, run: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in place.worker_pods(run))


def launches(run: str) -> bool:
    """Whether a launcher of the run has started torchrun."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            argv, env = ((path / name).read_text().split("\0") for name in ("cmdline", "environ"))
            if TORCHRUN in argv and f"MLPIPE_RUN_ID={run}" in env:
                return True
    return False


def test_two_half_placed_gangs_end(place, monkeypatch):
    """By the real scheduler, which is made to place one pod of each; followed with the driver's rights. They
    wait for each other until the younger one's pod hears SIGTERM: as PID 1 not before it has a handler, and
    no later word shortens what the kubelet grants it then."""
    monkeypatch.setattr(placement, "SETTLE_SECONDS", float("inf"))
    monkeypatch.setattr(placement, "_LOOK_SECONDS", 1.0)
    cluster = place.cluster
    kubeconfig = cluster.kubeconfig_for("mlpipe-driver", place.namespace)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    amounts = {"requests": {PLACE: 1}, "limits": {PLACE: 1}}
    patch = {
        "target": {"kind": "Pod", "component": "worker"},
        "strategic": {"spec": {"containers": [{"name": "worker", "resources": amounts}]}},
    }
    gangs = {}

    def start(run: str, **kubernetes) -> None:
        claim(run)
        path = place.spec(
            run, model={"entry": "kit.models:plain"}, steps=4, kubernetes={"patches": [patch], **kubernetes}
        )
        plan = plan_ahead(load_pipeline(path), "train", place.environment["MLPIPE_STORE"], run, cluster=True)
        with cluster.inside():
            gangs[run] = Gang(place.store(), connect(None, place.namespace), plan)

    offer(cluster, 1)
    start("old")
    place.until("a pod of the old gang", lambda: bound(place, "old") == 1)
    cluster.kubectl("taint", "node", "node-0", f"{TAINT}=:NoSchedule")
    # of two of one second the uid says which is older
    (old,) = place.objects("jobsets", "old")
    born = datetime.fromisoformat(old["metadata"]["creationTimestamp"]).timestamp()
    place.until("another second", lambda: time.time() >= born + 1)
    start("young", tolerations=[{"key": TAINT}])
    place.until("the young gang's pods", lambda: len(place.worker_pods("young")) == 2)
    offer(cluster, 2)
    place.until("a pod of the young gang", lambda: bound(place, "young") == 1)
    cluster.kubectl("taint", "node", "node-0", f"{TAINT}-")
    place.until("its launcher", lambda: launches("young"))
    monkeypatch.setattr(placement, "SETTLE_SECONDS", 1.0)
    ended = {run: place.until(f"the end of {run}", gang.poll, 600) for run, gang in gangs.items()}
    assert {run: one.state for run, one in ended.items()} == {"old": "done", "young": "done"}
    given_back = {
        run: place.objects("jobsets", run)[0]["metadata"]["annotations"].get(placement.YIELDED)
        for run in gangs
    }
    assert given_back["old"] is None
    assert int(given_back["young"]) >= 1
    offer(cluster, 0)
