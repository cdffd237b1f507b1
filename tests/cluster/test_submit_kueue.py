"""Runs in a queue of Kueue: one waits for quota and says so; one is preempted, saves, and goes on."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from pathlib import Path

import pytest
from kit.cluster_objects import named
from kit.place import add_queue
from kit.rendered import pipeline_of
from kit.run_ids import claim

from mlpipe._core.records import Start
from mlpipe.observe.records import read_records
from mlpipe.plan.ahead import plan_ahead
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.render.kubernetes import stage_objects
from mlpipe.spec.load import load_pipeline
from mlpipe.submit.kubernetes.api import connect
from mlpipe.submit.kubernetes.objects import create_all, selector
from mlpipe.submit.kubernetes.pending import why_pending

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
QUOTA = {"cpu": "600m", "memory": "6Gi", "ephemeral-storage": "100Gi"}  # of one gang
RACK, BLOCK = "mlpipe.test/rack", "mlpipe.test/block"
POOL = "mlpipe.test/pool"
INDEX = "batch.kubernetes.io/job-completion-index"


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
        preferred = command("preferred", "high", occupied)
        occupied.touch()
        place.submit(preferred, "preferred")
        place.until("the preferred run's pod", lambda: place.worker_pods("preferred"))
        place.until("the word on it", lambda: "suspended" in message("queued"), 120)
        occupied.unlink()
    place.submit(preferred, "preferred", "--wait")
    place.submit(spec, "queued", "--wait")
    undisturbed.check(place, "queued")
    assert place.run_state("queued").stages["train"].attempt == 1
    with place.cluster.inside():
        records = read_records(place.store(), "runs/queued/stages/train/attempt-1", 0)
    first, second = (record.start_step for record in records if isinstance(record, Start))
    assert (first, second >= 5) == (0, True)  # the checkpoint before the preemption was that of step 4


@pytest.fixture(scope="module")
def racks(place):
    """A thousand fake nodes of eight GPUs in racks of twenty and blocks of a hundred, of which every seventh
    is another's; and a queue over two racks of three more, each with room for one pod."""
    levels = [{"nodeLabel": label} for label in (BLOCK, RACK, "kubernetes.io/hostname")]
    with place.cluster.fake_nodes([fleet_labels(number) for number in range(1006)]):
        place.cluster.apply(named("kueue.x-k8s.io/v1beta2", "Topology", "racks", spec={"levels": levels}))
        quota = {"cpu": "100000", "memory": "1Pi", "ephemeral-storage": "1Pi", "nvidia.com/gpu": "8000"}
        for name in ("racks", "fleet"):
            add_queue(place, name, nodeLabels={POOL: name}, topologyName="racks", quota=quota)
        quota = {
            "spec": {"hard": {"requests.nvidia.com/gpu": "8000"}}
        }  # of the namespace, for 16 as it comes
        place.cluster.kubectl(
            *("-n", place.namespace, "patch", "quota", "mlpipe", "--type=merge", "-p", json.dumps(quota))
        )
        yield "racks"


def fleet_labels(number: int) -> dict[str, str]:
    if number >= 1000:
        return {BLOCK: "small", RACK: f"small-{(number - 1000) // 3}", POOL: "racks"}
    product = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    pool = {POOL: "fleet"} if number % 7 else {}
    return {BLOCK: f"block-{number // 100}", RACK: f"rack-{number // 20}", **pool, **product}


def rack_of(node: str) -> str:
    return fleet_labels(int(node.removeprefix("fake-")))[RACK]


def standing(place, run: str, num_pods: int) -> list[str]:
    """The nodes of the pods, by their numbers; none before all have one."""
    pods = {int(one["metadata"]["labels"][INDEX]): one["spec"] for one in place.worker_pods(run)}
    found = [pods[number].get("nodeName") for number in sorted(pods)]
    return found if len(found) == num_pods and all(found) else []


def test_nodes_that_share_weights_stand_in_one_rack(place, racks, monkeypatch):
    """Two times two do, though three have room in a rack; three times two would fit, if they need not."""
    cluster = place.cluster
    kubeconfig = cluster.kubeconfig_for("mlpipe-driver", place.namespace)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))

    def create(run: str, replicas: int) -> None:
        claim(run)
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

    with cluster.inside():
        api = connect(None, place.namespace)
        create("near", 2)
        nodes = place.until("four pods on nodes", lambda: standing(place, "near", 4))
        assert len(set(nodes)) == 4
        first, second, third, fourth = map(rack_of, nodes)
        assert {first, third} == {"small-0", "small-1"}
        assert (first, third) == (second, fourth)
        create("far", 3)
        wanted = selector("far", "train", 1)
        room = 'topology "racks" allows to fit only 2 out of 3 slice(s)'  # once the others have ended
        place.until("why it waits", lambda: room in why_pending(api, wanted))


def spread(mesh: Mesh, places: list[str], *axes: str) -> int:
    """Over how many places ranks stand at most that differ along these axes alone; `places`: by rank."""
    groups = defaultdict(set)
    for rank, one in enumerate(places):
        at = mesh.coordinates(rank)
        groups[tuple(at[axis] for axis in mesh.axes if axis not in axes)].add(one)
    return max(map(len, groups.values()))


GANGS = {  # by run: its mesh, and whether its pipelines, and all of it, have room in one rack
    "whole": ({"pp": 4, "dp_replicate": 2, "dp_shard": 4, "tp": 4}, True, True),
    "pipelines": ({"pp": 4, "dp_replicate": 4, "dp_shard": 4, "tp": 4}, True, False),
    "apart": ({"pp": 8, "dp_shard": 8, "tp": 4}, False, False),
}


def test_on_a_thousand_nodes_gangs_stand_by_labels_as_their_planner_reckoned(place, racks, monkeypatch):
    """Kueue's topology and the scheduler place what is rendered for three gangs. A pipeline of four stages
    has 8 nodes of a rack's 17, one of eight has 32. What the labels say of ranks is what the planner priced
    as inside of a rack, or not."""
    cluster = place.cluster
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig_for("mlpipe-driver", place.namespace)))

    def plan(run: str, rack_nodes: int | None = 16) -> Plan:
        size = math.prod(GANGS[run][0].values()) // 8
        network = {"profile": "own", "gb_per_second": 50}
        if rack_nodes is not None:
            network["racks"] = {"nodes": rack_nodes, "gb_per_second": 5}
        resources = {"nodes": size, "gpus_per_node": 8, "gpu": "H100-80GB", "cpus": 32, "memory": "256 GiB"}
        kubernetes = {
            "queue": "fleet",
            "topology": {"preferred": BLOCK, "inner": RACK},
            "tolerations": [{"key": "kwok.x-k8s.io/node"}],
        }
        wanted = {
            "train.strategy": "auto", "train.mesh": GANGS[run][0], "train.accumulation": 8,
            "train.activation_checkpointing": "full", "train.resources": resources,
            "kubernetes": kubernetes, "network": network,
        }  # fmt: skip
        pipeline = pipeline_of("llm", *(f"{key}={json.dumps(value)}" for key, value in wanted.items()))
        return plan_ahead(pipeline, "train", place.environment["MLPIPE_STORE"], run, cluster=True)

    def seconds(run: str, rack_nodes: int | None = 16) -> float:
        return plan(run, rack_nodes).part(TrainPlan).predicted.step_seconds

    with cluster.inside():
        api = connect(None, place.namespace)
        for run in GANGS:
            claim(run)
            create_all(api, stage_objects(plan(run)))
        for run, (_, pipelines_fit, all_fit) in GANGS.items():
            mesh = plan(run).part(TrainPlan).mesh
            size = mesh.world_size // 8
            stand = functools.partial(standing, place, run, size)
            nodes = place.until(f"{size} pods on nodes", stand)
            assert len(set(nodes)) == size
            by_number = {mesh.number_at(at, 8): node for at, node in enumerate(nodes)}
            hosts = [by_number[rank // 8] for rank in range(mesh.world_size)]
            racks_of_ranks = [rack_of(host) for host in hosts]
            assert spread(mesh, hosts, "tp") == 1
            assert spread(mesh, racks_of_ranks, "dp_shard", "tp") == 1
            assert (spread(mesh, racks_of_ranks, "pp") == 1) == pipelines_fit, run
            assert (len(set(racks_of_ranks)) == 1) == all_fit, run
            # the planner's seconds: as if there were no racks; as if no pipeline had room in one
            assert (seconds(run) == seconds(run, None)) == all_fit, run
            assert (seconds(run) == seconds(run, mesh.nodes_of_weights(8))) != pipelines_fit, run
