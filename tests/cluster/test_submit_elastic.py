"""An elastic training on a cluster: what befalls one node's pod is not the others' business."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from kit.cluster_objects import named
from kit.command_runs import Cli
from kit.place import quick_driver, shortened

from mlpipe._core.records import Membership, Start, Step
from mlpipe.observe.records import decode_lines, read_records
from mlpipe.render import names
from mlpipe.store.folder import FolderStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
STEPS = 400
KEY = "runs/elastic/stages/train/attempt-1"
# of three replicas and their coordinator; one more pod has no room
QUOTA = {"cpu": "900m", "memory": "64Gi", "ephemeral-storage": "1000Gi"}
# less patience than a driver has for a lost node's pod
QUICK = quick_driver({"mlpipe.submit.kubernetes.gang:_LOST_SECONDS": 3.0})


@pytest.fixture
def queue(place):
    """With two priorities."""
    resources = [{"name": name, "nominalQuota": amount} for name, amount in QUOTA.items()]
    group = {"coveredResources": [*QUOTA], "flavors": [{"name": "any", "resources": resources}]}
    preemption = {"withinClusterQueue": "LowerPriority"}
    spec = {"namespaceSelector": {}, "resourceGroups": [group], "preemption": preemption}
    version = "kueue.x-k8s.io/v1beta1"  # the older one, which Kueue converts
    place.cluster.apply(
        named(version, "ResourceFlavor", "any"),
        named(version, "ClusterQueue", "elastic", spec=spec),
        named(version, "LocalQueue", "elastic", place.namespace, spec={"clusterQueue": "elastic"}),
        *(
            {**named(version, "WorkloadPriorityClass", name), "value": value, "description": name}
            for name, value in (("spare", 1), ("urgent", 1000))
        ),
    )
    return "elastic"


class Training:
    """The run `elastic`. `struck`: how often each replica was, by number."""

    def __init__(self, place: Any) -> None:
        self.place, self.struck = place, Counter[int]()

    def members(self) -> list[list[int]]:
        with self.place.cluster.inside():
            data, _ = self.place.store().read_log(f"{KEY}/events.jsonl")
        found = [one for one in decode_lines(data.split(b"\n")) if isinstance(one, Membership)]
        return [sorted(one.members or []) for one in found]

    def pods(self, replica: int | None) -> list[dict[str, Any]]:
        """None: of the coordinator."""
        number = None if replica is None else str(replica)
        found = self.place.worker_pods("elastic")
        return [pod for pod in found if pod["metadata"]["labels"].get(names.REPLICA) == number]

    def on(self, node: str) -> set[int]:
        """Replicas whose pods are there."""
        found = [pod for pod in self.place.worker_pods("elastic") if pod["spec"].get("nodeName") == node]
        labels = [pod["metadata"]["labels"] for pod in found]
        return {int(one[names.REPLICA]) for one in labels if names.REPLICA in one}

    def suspended(self) -> set[int]:
        """Replicas that wait for room."""
        jobs = [job for job in self.place.objects("jobs", "elastic") if job["spec"].get("suspend")]
        labels = [job["metadata"]["labels"] for job in jobs]
        return {int(one[names.REPLICA]) for one in labels if names.REPLICA in one}

    def strike(self, *replicas: int) -> int:
        """How many quorums there have been before."""
        self.struck.update(replicas)
        return len(self.members())

    def until(self, what: str, members: list[int], since: int = 0) -> None:
        """They take part, and the store knows that each began: with a node goes what it had not shipped."""
        self.place.until(f"{what}: {members}", lambda: members in self.members()[since:])
        begun = {one: 1 + self.struck[one] for one in members}
        self.place.until(f"starts {begun}", lambda: all(len(self.starts(one)) >= begun[one] for one in begun))

    def starts(self, replica: int) -> list[Start]:
        return [one for one in self.records(replica) if isinstance(one, Start)]

    def until_later(self) -> None:
        """Two more steps of whomever."""
        last = self.last_step()
        self.place.until("two more steps", lambda: self.last_step() >= last + 2)

    def last_step(self) -> int:
        return max(one.step for rank in range(4) for one in self.records(rank) if isinstance(one, Step))

    def records(self, replica: int) -> list[Any]:
        with self.place.cluster.inside():
            return read_records(self.place.store(), KEY, replica)


def test_pods_die_leave_and_come_and_the_others_go_on(place, hold, second, queue, occupied, tmp_path):
    """One of three is deleted by force, at once with the coordinator; a node is drained; Kueue takes one back
    for who is more urgent, and gives it room again; a node is lost for good while the other takes no pods,
    and one is added; then one fewer is wanted."""
    node = f"node-{second}"
    short = {"operator": "Exists", "effect": "NoExecute", "toleration_seconds": 3}
    tolerations = [{"key": f"node.kubernetes.io/{state}", **short} for state in ("unreachable", "not-ready")]
    of_queue = {"queue": queue, "queue_priority": "spare"}
    spec = place.spec(
        "elastic",
        model=hold.model,  # ten minutes of so many steps
        nodes="2..3",
        strategy="single",
        deterministic=False,
        steps=STEPS,
        checkpoint={"every": "1000 steps"},
        kubernetes={**of_queue, "tolerations": tolerations, "patches": [QUICK]},
        # the next coordinator takes the seat of a dead one sooner than after half a minute
        env=shortened({"mlpipe.store.s3_log:FLUSH_SECONDS": 1.0, "mlpipe.store.replicas:SEAT_SECONDS": 10.0}),
    )
    urgent = place.spec("urgent", model=hold.model, kubernetes={**of_queue, "queue_priority": "urgent"})
    document = json.loads(urgent.read_text())
    wait = 'while [ -e "$0" ]; do sleep 0.2; done'
    command = {"command": ["sh", "-c", wait, str(occupied)], "resources": {"cpus": 0.25, "memory": "1 GiB"}}
    document["stages"] = [{"name": "train", **command}]
    urgent.write_text(json.dumps(document))
    training, all_three = Training(place), [0, 1, 2]

    with hold:
        place.submit(spec, "elastic")
        training.until("three nodes", all_three)
        place.until_step("elastic", 1)

        before = training.strike(1)
        for pod in training.pods(1) + training.pods(None):
            name = pod["metadata"]["name"]
            place.cluster.kubectl("-n", place.namespace, "delete", "pod", name, "--grace-period=0", "--force")
        training.until("three again, by another coordinator", all_three, before)
        training.until_later()

        drained = training.on(node)
        assert drained
        before = training.strike(*drained)
        place.cluster.kubectl(
            "drain", node, "--force", "--delete-emptydir-data", "--timeout=240s", timeout=300
        )
        training.until("three, elsewhere", all_three, before)
        assert not training.on(node)
        place.cluster.kubectl("uncordon", node)

        before = len(training.members())
        place.submit(urgent, "urgent")
        place.until("one that Kueue took back", training.suspended)
        (taken,) = training.suspended()
        training.strike(taken)
        rest = [one for one in all_three if one != taken]
        training.until("the others", rest, before)
        training.until_later()
        occupied.unlink()
        training.until("three again, there is room", all_three, before)
        place.submit(urgent, "urgent", "--wait")

        assert training.on(node) == {taken}, "where there is most room"
        before = len(training.members())
        place.cluster.kubectl("cordon", "node-0")
        place.cluster.kill_node(second)
        place.until("another number in the place of the lost one", lambda: training.pods(3))
        training.until("the others, which wait for no node", rest, before)
        training.until_later()
        assert "nodeName" not in training.pods(3)[0]["spec"]
        added = place.cluster.add_node()
        training.until("three, one on the new node", [*rest, 3], before)
        assert training.on(added.name) == {3}
        place.cluster.kubectl("uncordon", "node-0")
        training.until_later()
        before = len(training.members())
        place.mlpipe("scale", "elastic", "--nodes", "2")
        training.until("one fewer", rest, before)
        assert not training.pods(3)
    place.submit(spec, "elastic", "--wait")
    place.cluster.kubectl("delete", "node", node)

    found = {rank: training.records(rank) for rank in range(4)}
    starts = {rank: training.starts(rank) for rank in range(4)}
    expected = {rank: 1 + training.struck[rank] for rank in range(4)}
    assert {rank: len(starts[rank]) for rank in range(4)} == expected, "who was not struck began once"
    later = [one for rank in range(4) for one in starts[rank][rank < 3 :]]
    assert all(one.resumed_from is None for one in later), "healed by a peer, not by the store"
    of_steps = [one for lines in found.values() for one in lines if isinstance(one, Step)]
    losses = {one.step: one.loss for one in of_steps}
    assert losses == pytest.approx(undisturbed(spec, tmp_path), rel=1e-4), "no step lost, and each as it is"
    for lines in found.values():
        assert max(Counter(one.step for one in lines if isinstance(one, Step)).values()) == 1
    state = place.run_state("elastic")
    assert (state.state, state.stages["train"].attempt) == ("done", 1)
    jobs = {job["metadata"]["name"] for job in place.objects("jobs", "elastic")}
    assert all(not name.endswith("a1-3") for name in jobs), json.dumps(sorted(jobs))


def undisturbed(spec: Path, folder: Path) -> dict[int, float]:
    """Losses by step of the same training on this machine, of one node."""
    cli = Cli(folder)
    done = cli.start("run", str(spec), "--run-id", "alone", "--set=stages.train.resources.nodes=1")
    out, err = done.communicate(timeout=600)
    assert done.returncode == 0, err + out
    records = read_records(FolderStore(cli.store), KEY.replace("elastic", "alone"), 0)
    return {one.step: one.loss for one in records if isinstance(one, Step)}
