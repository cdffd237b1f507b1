"""Runs in a queue of Kueue: one waits for quota and says so; one is preempted, saves, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.cluster_objects import named

from mlpipe._core.records import Start
from mlpipe.observe.records import read_records

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
QUOTA = {"cpu": "600m", "memory": "6Gi", "ephemeral-storage": "100Gi"}  # of one gang


@pytest.fixture
def queue(place):
    """With quota for one run at a time, and two priorities."""
    resources = [{"name": name, "nominalQuota": amount} for name, amount in QUOTA.items()]
    group = {"coveredResources": [*QUOTA], "flavors": [{"name": "some", "resources": resources}]}
    spec = {
        "namespaceSelector": {},
        "resourceGroups": [group],
        "preemption": {"withinClusterQueue": "LowerPriority"},
    }
    version = "kueue.x-k8s.io/v1beta1"
    priorities = [
        {**named(version, "WorkloadPriorityClass", name), "value": value, "description": name}
        for name, value in (("low", 1), ("high", 1000))
    ]
    place.cluster.apply(
        named(version, "ResourceFlavor", "some"),
        named(version, "ClusterQueue", "runs", spec=spec),
        named(version, "LocalQueue", "team", place.namespace, spec={"clusterQueue": "runs"}),
        *priorities,
    )
    return "team"


def test_one_run_waits_for_another_and_one_of_higher_priority_preempts_it(
    place, hold, undisturbed, queue, occupied
):
    def command(name: str, priority: str, while_file: Path) -> Path:
        """Takes more than half of the quota."""
        path = place.spec(name, model=hold.model, kubernetes={"queue": queue, "queue_priority": priority})
        document = json.loads(path.read_text())
        wait = 'while [ -e "$0" ]; do sleep 0.2; done'
        document["stages"] = [
            {
                "name": "train",
                "command": ["sh", "-c", wait, str(while_file)],
                "resources": {"cpus": 0.4, "memory": "1 GiB"},
            }
        ]
        path.write_text(json.dumps(document))
        return path

    def message(run_id: str) -> str:
        return str(place.json("status", run_id)["stages"]["train"]["message"])

    first = command("first", "low", occupied)
    place.submit(first, "first")
    place.until("the first run's pod", lambda: place.worker_pods("first"))
    spec = place.spec("queued", model=hold.model, kubernetes={"queue": queue, "queue_priority": "low"})
    with hold:
        place.submit(spec, "queued")
        place.until("its reason to wait", lambda: "have the queue's quota raised" in message("queued"), 120)
        assert place.worker_pods("queued") == []
        occupied.unlink()
        place.submit(first, "first", "--wait")
        place.until_step("queued", 5)
        assert message("queued") == ""
        urgent = command("urgent", "high", occupied)
        occupied.touch()
        place.submit(urgent, "urgent")
        place.until("the urgent run's pod", lambda: place.worker_pods("urgent"))
        place.until("the word on it", lambda: "suspended" in message("queued"), 120)
        occupied.unlink()
    place.submit(urgent, "urgent", "--wait")
    place.submit(spec, "queued", "--wait")
    undisturbed.check(place, "queued")
    assert place.run_state("queued").stages["train"].attempt == 1
    with place.cluster.inside():
        records = read_records(place.store(), "runs/queued/stages/train/attempt-1", 0)
    first, second = (record.start_step for record in records if isinstance(record, Start))
    assert (first, second >= 5) == (0, True)  # the checkpoint before the preemption was that of step 4
