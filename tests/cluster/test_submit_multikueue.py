"""A stage that is sent to another cluster, by a real manager of MultiKueue without nodes; here pods run."""

from __future__ import annotations

import json

import pytest
from kit.manager import WORKER, manager
from kit.place import add_queue

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
QUEUE = "sent"
QUOTA = {"cpu": "600m", "memory": "6Gi", "ephemeral-storage": "100Gi"}  # of one gang


def test_a_run_in_another_cluster_ends_as_if_nothing_had_befallen_it(place, hold, undisturbed, tmp_path):
    """Its manager takes it back and sends it again. Its driver runs where a pod of the manager's would."""
    add_queue(place, QUEUE, quota=QUOTA)
    with manager(place.cluster, tmp_path / "manager") as one:
        there = one.place(place, QUEUE, QUOTA)
        one.kubectl("-n", place.namespace, "create", "serviceaccount", "own")  # which the worker lacks
        own = {"queue": QUEUE, "service_account": "own"}
        refused = there.submit(there.spec("sent", model=hold.model, kubernetes=own), "sent", code=2)
        assert f"cluster {WORKER}: " in refused
        assert 'serviceaccount "own" not found' in refused
        spec = there.spec("sent", model=hold.model, kubernetes={"queue": QUEUE})

        def let(policy: str) -> None:
            body = json.dumps({"spec": {"stopPolicy": policy}})
            one.kubectl("patch", "clusterqueue", QUEUE, "--type=merge", "-p", body)

        def message() -> str:
            return str(there.json("status", "sent")["stages"]["train"]["message"])

        with hold:
            there.submit(spec, "sent")
            account = str(one.control.kubeconfig_for("mlpipe-driver", place.namespace))
            driver = there.start("resume", "sent", "--here", KUBECONFIG=account)
            there.until_step("sent", 2)
            assert len(there.worker_pods("sent")) == 2
            there.until("where it is", lambda: message() == f"MultiKueue sent it to cluster {WORKER}")
            let("HoldAndDrain")
            there.until("another attempt", lambda: "Kueue" in message() and not there.worker_pods("sent"))
            let("None")
        assert driver.wait(300) == 0
    undisturbed.check(place, "sent")
    assert place.run_state("sent").stages["train"].attempt == 2
