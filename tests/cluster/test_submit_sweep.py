"""A sweep whose trials are runs in a real cluster."""

from __future__ import annotations

import json

import pytest
from kit.undisturbed import losses

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_pod_a_trial_and_the_client_are_lost_and_the_others_never_know(place, hold, undisturbed):
    """Two at a time: a pod of the first is deleted, the second is cancelled, whoever drives the sweep is
    killed; the next one starts the third. The first has seed 0, and is the run that nothing befell."""
    spec = place.spec("swept", model=hold.model, nodes=1, resources={"workers_per_node": 2})
    sweep = {"over": {"seed": "0..2"}, "max_parallel": 2, "metric": {"name": "loss"}}
    spec.write_text(json.dumps({**json.loads(spec.read_text()), "sweep": sweep}))
    with hold:
        client = place.start("sweep", spec, "--to", "kubernetes", "--sweep-id", "s")
        place.until_step("s-000", 2)
        (lost,) = place.worker_pods("s-000")  # before it ends, however late the other one begins
        place.cluster.kubectl(
            "-n", place.namespace, "delete", "pod", lost["metadata"]["name"], "--wait=false"
        )
        place.until_step("s-001", 2)
        assert "train is saved at step" in place.mlpipe("cancel", "s-001").stdout
        client.kill()
        client.wait(10)
        place.until("the first trial's other pod", lambda: place.worker_pods("s-000"))
    done = place.json("sweep", "--resume", "s")
    assert [one["state"] for one in done["trials"]] == ["done", "cancelled", "done"]
    undisturbed.check(place, "s-000")
    (jobset,) = place.objects("jobsets", "s-000")
    assert jobset["status"]["restarts"] == 1
    with place.cluster.inside():
        assert sorted(losses(place.store(), "s-002")) == sorted(undisturbed.losses)
    first, _, third = (one["value"] for one in done["trials"])
    assert done["best"] == ("000" if first < third else "002")
    table = place.mlpipe("status", "s").stdout
    assert all(f"00{number}  " in table for number in range(3))
    assert [place.run_state(f"s-00{number}").stages["train"].attempt for number in range(3)] == [1, 1, 1]
