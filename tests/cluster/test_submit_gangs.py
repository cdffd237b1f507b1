"""Gangs of commands, and the check of machines before a gang of ranks, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from kit import meet, meet_jax

from mlpipe.store import outputs
from mlpipe.store.preflight import read_checked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
POD = "mlpipe.submit.pod"
LIMITS = {"store_mb_per_second": 2, "slow_ratio": 0.01}  # of a preflight


def command(place, name, *argv):
    """A pipeline of one command on two nodes, which is not restarted."""
    path = place.spec(name, model={"entry": "none"}, kubernetes={"max_gang_restarts": 0})
    document = json.loads(path.read_text())
    resources = {"nodes": 2, "cpus": 0.25, "memory": "2 GiB"}
    document["stages"] = [{"name": "c", "command": argv, "resources": resources}]
    path.write_text(json.dumps(document))
    return path


def first_process(run_id, index):
    """Of the pod of that index, on this machine."""
    wanted = {f"MLPIPE_RUN_ID={run_id}", f"JOB_COMPLETION_INDEX={index}"}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            argv, env = ((path / file).read_text().split("\0") for file in ("cmdline", "environ"))
        except OSError:
            continue
        if POD in argv and wanted <= set(env):
            return int(path.name)
    return None


def test_a_command_on_two_nodes_meets_and_ends_together(place, tmp_path):
    """Of JAX; of torch, with the first that fails. Of one that is killed speaks nobody who was stopped for
    it."""
    for name, argv, code in (("meets", [meet_jax.__file__], 0), ("breaks", [meet.__file__, "1"], 3)):
        spec = command(place, name, "python", argv[0], "{{output}}", *argv[1:])
        said = place.submit(spec, name, "--wait", code=code)
        assert ("broken" in said) is (code == 3)
    with place.cluster.inside():
        folder = outputs.fetch_output(place.store(), "runs/meets/stages/c", tmp_path)
        assert not place.store().exists("runs/breaks/stages/c/outputs/MANIFEST.json")
    assert (folder / "total").read_text() == "3.0 0"
    spec = command(place, "killed", "sleep", "600")
    place.submit(spec, "killed")
    pids = [
        place.until(f"pod {index}", lambda index=index: first_process("killed", index)) for index in (0, 1)
    ]
    os.kill(pids[1], signal.SIGKILL)
    place.submit(spec, "killed", "--wait", code=4)
    assert "ended with exit code 137" in place.run_state("killed").stages["c"].message


@contextmanager
def shaped(node):
    """Its link to all others, the store among them, is slow."""
    link = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "6mbit"]
    shape = node.namespaces.network([*link, "burst", "32kb", "latency", "400ms"])
    subprocess.run(shape, check=True, timeout=60)
    try:
        yield
    finally:
        mend = node.namespaces.network(["tc", "qdisc", "del", "dev", "eth0", "root"])
        subprocess.run(mend, check=True, timeout=60)


def test_a_node_at_fault_is_named_and_left_out_of_the_next_attempt(place, hold, second):
    """It reaches the store too slowly: its link is shaped."""
    node = place.cluster.nodes[second]
    spec = place.spec("checked", model=hold.model, steps=2, resources={"preflight": LIMITS})
    with shaped(node):
        place.submit(spec, "checked", "--wait")
    state = place.run_state("checked").stages["train"]
    assert (state.state, state.attempt) == ("done", 2)
    with place.cluster.inside():
        checked = read_checked(place.store(), "runs/checked/stages/train/attempt-1")
    assert list(checked.faults) == [node.name]
    assert [words for words in checked.faults[node.name] if words.startswith("store ")]
    pods = place.objects("pods", "checked", **{"mlpipe.dev/attempt": "2"})
    assert {pod["spec"]["nodeName"] for pod in pods} == {"node-0"}


def test_a_spare_has_the_ranks_of_a_node_at_fault(place, hold, undisturbed, second):
    """Of three pods one stands on that node, which has one GPU; it leaves when the others have trained."""
    node = place.cluster.nodes[second]
    for index, num_gpus in ((0, 2), (second, 1)):
        place.cluster.set_gpus(index, num_gpus)
    worker = {"name": "worker", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    patch = {"target": {"kind": "Pod", "stage": "train"}, "strategic": {"spec": {"containers": [worker]}}}
    spec = place.spec(
        "spare",
        model=hold.model,
        resources={"preflight": LIMITS, "spares": 1},
        kubernetes={"patches": [patch]},
    )
    with shaped(node):
        place.submit(spec, "spare", "--wait")
    state = place.run_state("spare").stages["train"]
    assert (state.state, state.attempt) == ("done", 1)
    undisturbed.check(place, "spare")
    with place.cluster.inside():
        checked = read_checked(place.store(), "runs/spare/stages/train/attempt-1")
    assert list(checked.faults) == [node.name]
    pods = place.worker_pods("spare")
    assert [pod["status"]["phase"] for pod in pods] == ["Succeeded"] * 3
    (there,) = [pod["metadata"]["name"] for pod in pods if pod["spec"]["nodeName"] == node.name]
    said = place.cluster.kubectl("-n", place.namespace, "logs", there)
    assert "no ranks here: others meet at" in said
