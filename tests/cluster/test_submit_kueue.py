"""Runs in a queue of Kueue: one waits for quota and says so; one is preempted, saves, and goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.cluster_objects import named

from mlpipe._core.records import Start
from mlpipe.observe.records import read_records
from mlpipe.plan.ahead import plan_ahead
from mlpipe.render.kubernetes import stage_objects
from mlpipe.spec.load import load_pipeline
from mlpipe.submit.kubernetes.api import connect
from mlpipe.submit.kubernetes.objects import create_all, selector
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
QUOTA = {"cpu": "600m", "memory": "6Gi", "ephemeral-storage": "100Gi"}  # of one gang
RACK, BLOCK = "mlpipe.test/rack", "mlpipe.test/block"
INDEX = "batch.kubernetes.io/job-completion-index"


def add_queue(place, name, **flavor):
    """The chart's, with two priorities, in the newest version of Kueue's API that is served here."""
    served = place.cluster.get("/apis/kueue.x-k8s.io")
    assert served["preferredVersion"]["version"] == "v1beta2"
    known = [f"--api-versions={one['groupVersion']}/ClusterQueue" for one in served["versions"]]
    priorities = {"low": 1, "high": 1000, "mlpipe-low": None, "mlpipe-high": None}
    values = {"enabled": True, "name": name, "priorities": priorities, "flavors": [{"name": name, **flavor}]}
    place.chart("kueue", "--set-json", f"kueue={json.dumps(values)}", *known)
    return name


@pytest.fixture
def queue(place):
    """With quota for one run at a time."""
    return add_queue(place, "team", quota=QUOTA)


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


@pytest.fixture
def racks(place):
    """A queue over two racks of three fake nodes, each with room for one pod."""
    levels = [{"nodeLabel": label} for label in (BLOCK, RACK, "kubernetes.io/hostname")]
    with place.cluster.fake_nodes(6):
        for number in range(6):
            labels = f"{BLOCK}=block", f"{RACK}={number // 3}"
            place.cluster.kubectl("label", "node", f"fake-{number}", *labels)
        place.cluster.apply(named("kueue.x-k8s.io/v1beta2", "Topology", "racks", spec={"levels": levels}))
        quota = {"cpu": "1000", "memory": "1Ti", "ephemeral-storage": "1Ti"}
        yield add_queue(place, "racks", nodeLabels={"type": "kwok"}, topologyName="racks", quota=quota)


def test_nodes_that_share_weights_stand_in_one_rack(place, racks, monkeypatch):
    """Two times two do, though three have room in a rack; three times two would fit, if they need not."""
    cluster = place.cluster
    kubeconfig = cluster.kubeconfig_for("mlpipe-driver", place.namespace)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    def create(run: str, replicas: int) -> None:
        spec = place.spec(
            run,
            model={"entry": "kit.models:plain"},
            nodes=2 * replicas,
            strategy="hsdp",
            mesh={"dp_replicate": replicas, "dp_shard": 2},
            data={"entry": "kit.models:numbers", "batch_size": 12},
            resources={"cpus": 33},
            kubernetes={
                "queue": racks,
                "topology": {"preferred": BLOCK, "inner": RACK},
                "tolerations": [{"key": "kwok.x-k8s.io/node"}],
            },
        )
        plan = plan_ahead(load_pipeline(spec), "train", place.environment["MLPIPE_STORE"], run, cluster=True)
        create_all(api, stage_objects(plan))

    def stand() -> list[str]:
        """The nodes of the pods, by their numbers; none before all have one."""
        pods = {int(one["metadata"]["labels"][INDEX]): one["spec"] for one in place.worker_pods("near")}
        found = [pods[number].get("nodeName") for number in sorted(pods)]
        return found if len(found) == 4 and all(found) else []

    with cluster.inside():
        api = connect(None, place.namespace)
        create("near", 2)
        nodes = place.until("four pods on nodes", stand)
        assert len(set(nodes)) == 4
        in_rack = [int(node.removeprefix("fake-")) // 3 for node in nodes]
        assert in_rack in ([0, 0, 1, 1], [1, 1, 0, 0])
        create("far", 3)
        wanted = selector("far", "train", 1)
        room = 'topology "racks" allows to fit only 2 out of 3 slice(s)'  # once the others have ended
        place.until("why it waits", lambda: room in why_pending(api, wanted))
