"""A command on several nodes: what each of its processes is told, whose output counts, when it is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from kit.command_runs import Cli, shell, until, write_spec
from kit.synthetic_run import stage_plan

from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.store import outputs
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, read_outcome, write_outcome
from mlpipe.submit.handle import outcomes_of

pytestmark = pytest.mark.unit
TWO = {"resources": {"nodes": 2}}
# Each says who it is, and waits for the other.
MEET = """
echo $MLPIPE_NODE_RANK of $MLPIPE_NUM_NODES at $MASTER_ADDR:$MASTER_PORT $JAX_COORDINATOR_ADDRESS > "$1/who"
cat "$1/who"
touch here-$MLPIPE_NODE_RANK
until [ -e here-0 ] && [ -e here-1 ]; do sleep 0.05; done
"""


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path)


def log(cli: Cli, node: int) -> str:
    return (cli.store / f"runs/r/stages/a/attempt-1/logs/rank-{node}.log").read_text()


def test_on_this_machine_they_meet_and_the_first_ones_folder_is_the_output(cli: Cli):
    write_spec(cli.folder, {"a": shell(MEET)}, a=TWO)
    cli("run", "pipeline.yaml", "--run-id", "r")
    lines = [log(cli, node).split() for node in (0, 1)]
    assert [line[:3] for line in lines] == [["0", "of", "2"], ["1", "of", "2"]]
    assert lines[0][4:] == lines[1][4:]
    assert lines[0][4] == lines[0][5] != "localhost:0"
    made = cli.store / "runs/r/stages/a/outputs/files"
    assert (made / "who").read_text() == log(cli, 0)


def test_the_first_that_fails_ends_the_others_and_nothing_is_committed(cli: Cli):
    fails = shell("[ $MLPIPE_NODE_RANK = 0 ] || { echo broken; exit 7; }; touch $1/made; exec sleep 600")
    write_spec(cli.folder, {"a": fails}, a=TWO)
    said = cli("run", "pipeline.yaml", "--run-id", "r", code=3).stderr
    assert "node 1: exited with code 7; its last lines:\n  | broken" in said
    assert not (cli.store / "runs/r/stages/a/outputs/MANIFEST.json").exists()


def test_a_cancel_ends_all_of_them(cli: Cli):
    write_spec(cli.folder, {"a": shell(MEET + "touch begun-$MLPIPE_NODE_RANK; exec sleep 600")}, a=TWO)
    running = cli.start("run", "pipeline.yaml", "--run-id", "r")
    until(lambda: all((cli.folder / f"begun-{node}").exists() for node in (0, 1)), "both to begin")
    cli("cancel", "r")
    assert running.wait(300) == 5


class Pods:
    """Of one attempt of a gang: PID 1 of each, as on a cluster."""

    def __init__(self, folder: Path, script: str, num_nodes: int = 2) -> None:
        self.folder, self.store = folder, FolderStore(folder / "store")
        plan = stage_plan("r", "a", work=CommandPlan(tuple(shell(script))))
        launch = plan.launch._replace(num_nodes=num_nodes, nproc_per_node=1)
        self.plan = replace(plan, store_url=str(folder / "store"), launch=launch)
        (folder / "plan.json").write_text(self.plan.to_json())

    def start(self, index: int, restart: int = 0) -> subprocess.Popen[str]:
        env = os.environ | {
            "JOB_COMPLETION_INDEX": str(index),
            "MLPIPE_RENDEZVOUS": "first:29500",
            "MLPIPE_GANG_RESTART": str(restart),
        }
        scratch = self.folder / f"scratch-{index}-{restart}"
        scratch.mkdir()
        argv = [sys.executable, "-m", "mlpipe.submit.pod", "--plan", str(self.folder / "plan.json")]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([*argv, "--scratch", str(scratch)], env=env, cwd=self.folder, **pipes)

    def outcome(self, index: int) -> AttemptOutcome | None:
        name = "outcome.json" if index == 0 else f"outcome-node-{index}.json"
        return read_outcome(self.store, f"{self.plan.attempt_key}/{name}")

    @property
    def committed(self) -> bool:
        return self.store.exists(f"{self.plan.stage_key}/outputs/MANIFEST.json")


def test_on_a_cluster_the_first_commits_when_all_are_done(tmp_path):
    pods = Pods(
        tmp_path, 'echo $MLPIPE_NODE_RANK $JAX_COORDINATOR_ADDRESS > "$1/who"; cat go-$MLPIPE_NODE_RANK'
    )
    os.mkfifo(tmp_path / "go-1")
    (tmp_path / "go-0").touch()
    stale = AttemptOutcome("done", restarts=0)  # of the gang's start before this one
    write_outcome(pods.store, f"{pods.plan.attempt_key}/outcome-node-1.json", stale)
    first = pods.start(0, restart=1)
    assert first.stdout is not None
    assert first.stdout.readline() == "done; waits for nodes 1\n"
    second = pods.start(1, restart=1)
    with (tmp_path / "go-1").open("w"):
        assert not pods.committed
        assert first.poll() is None
    assert (second.wait(300), first.wait(300)) == (0, 0)
    folder = outputs.fetch_output(pods.store, pods.plan.stage_key, tmp_path / "cache")
    assert (folder / "who").read_text() == "0 first:29500\n"
    assert pods.outcome(0).details["digest"]


def test_on_a_cluster_the_first_fails_with_one_that_fails(tmp_path):
    pods = Pods(tmp_path, "exit $MLPIPE_NODE_RANK")
    second = pods.start(1)
    assert second.wait(300) == 3
    first = pods.start(0)
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 3
    assert "failed: node 1: exited with code 1" in out
    assert not pods.committed
    assert json.loads(pods.store.get(f"{pods.plan.attempt_key}/outcome.json"))["kind"] == "failed"


def test_on_a_cluster_an_output_that_cannot_be_kept_is_told(tmp_path):
    pods = Pods(tmp_path, 'ln -s /nowhere "$1/link"')
    second, first = pods.start(1), pods.start(0)
    assert (second.wait(300), first.wait(300)) == (0, 2)
    assert pods.outcome(0).kind == "input"
    assert "link" in pods.outcome(0).message


def test_another_node_that_is_done_makes_no_stage_that_is(tmp_path):
    """Where the first one was lost: what only it has was never committed."""
    pods = Pods(tmp_path, "true")
    write_outcome(pods.store, f"{pods.plan.attempt_key}/outcome-node-1.json", AttemptOutcome("done"))
    assert outcomes_of(pods.store, pods.plan) == []
    write_outcome(pods.store, f"{pods.plan.attempt_key}/outcome.json", AttemptOutcome("done"))
    assert len(outcomes_of(pods.store, pods.plan)) == 1


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_command_that_is_signalled_with_its_pod_and_ends_well_is_not_done(tmp_path, num_nodes):
    """As Slurm signals every process of a job: what it has made is half of it."""
    pods = Pods(tmp_path, 'touch "$1/half"; kill -TERM $PPID; exit 0', num_nodes)
    index = num_nodes - 1
    assert pods.start(index).wait(300) == 5
    assert pods.outcome(index).kind == "cancelled"
    assert not pods.committed


def test_on_a_cluster_nothing_begins_that_is_cancelled_by_then(tmp_path):
    pods = Pods(tmp_path, "touch begun")
    pods.store.put("runs/r/cancel", b"ann asked for it")
    assert pods.start(1).wait(300) == 5
    assert (pods.outcome(1).kind, pods.outcome(1).message) == ("cancelled", "stopped before it began")
    assert not (tmp_path / "begun").exists()
