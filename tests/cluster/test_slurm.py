"""`mlpipe submit --to slurm` on a real Slurm of three nodes: as on a laptop; limits, lost nodes, cancels."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kit import meet, meet_jax, processes
from kit.command_runs import Cli, until
from kit.place import training
from kit.run_ids import claim_named
from kit.servers import ServerMissingError
from kit.slurm import Slurm, slurm
from kit.undisturbed import Hold, Undisturbed, check_processes, last_digest, losses, ranks, workers_of

from mlpipe._core.records import Membership, Start, Step
from mlpipe.observe.records import decode_lines, read_records
from mlpipe.store import catalogue, runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.preflight import read_checked

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


class Login(Cli):
    """A person on the login node."""

    def __init__(self, folder: Path, cluster: Slurm) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.env |= cluster.environment
        self.env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        claim_named(arguments)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
        argv = self.cluster.argv([sys.executable, "-m", "mlpipe.cli", *arguments], self.folder)
        return subprocess.Popen(argv, env=self.env, text=True, **{**pipes, **options})

    @property
    def there(self) -> FolderStore:
        return FolderStore(self.store)

    def submit(self, spec: Path, run_id: str, *more: str) -> str:
        return self("submit", str(spec), "--to", "slurm", "--run-id", run_id, *more).stderr

    def until_step(self, run_id: str, step: int, attempt: int = 1) -> None:
        def reached() -> bool:
            found = read_records(self.there, f"runs/{run_id}/stages/train/attempt-{attempt}", 0)
            return max((one.step for one in found if isinstance(one, Step)), default=0) >= step

        until(reached, f"step {step} of {run_id}")

    def until_note(self, run_id: str, words: str, stage: str = "train") -> None:
        until(lambda: words in runs.read_run(self.there, run_id).stages[stage].message, f"status: {words}")

    def last_saved(self, run_id: str) -> int:
        last = catalogue.latest(self.there, f"runs/{run_id}/stages/train")
        return 0 if last is None else last.step

    def job(self, run_id: str) -> str:
        """The id of its one job under way, or of its array."""
        lines = self.cluster.run("squeue", "--noheader", "--format=%F %j").splitlines()
        (found,) = {line.split()[0] for line in lines if line.split()[1].startswith(f"mlpipe/{run_id}/")}
        return found

    def waiting(self, array: str) -> set[str]:
        """Its tasks that do."""
        options = ("--noheader", "--array", "--states=PENDING", "--format=%i")
        return set(self.cluster.run("squeue", f"--jobs={array}", *options).split())

    def restarts(self, job: str) -> int:
        text = self.cluster.run("scontrol", "show", "job", job)
        return int(text.partition("Restarts=")[2].split()[0])


@pytest.fixture(scope="module")
def cluster():
    # Slurm's daemons want paths that are shorter than pytest's
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        try:
            with slurm(Path(folder)) as one:
                yield one
        except ServerMissingError as error:
            pytest.skip(str(error))


@pytest.fixture(scope="module")
def hold():
    one = Hold()
    yield one
    one.release()


@pytest.fixture(scope="module")
def person(tmp_path_factory, cluster):
    return Login(tmp_path_factory.mktemp("login"), cluster)


@pytest.fixture(scope="module")
def spec(person, hold):
    """Nothing is saved but when the training is asked to stop."""
    resources = {"nodes": 2, "cpus": 1, "memory": "2 GiB"}
    stage = training(hold.model, resources, checkpoint={"every": "1000 steps"})
    document = {"version": 1, "name": "p", "slurm": {"time": "30 min"}, "stages": [stage]}
    path = person.folder / "pipeline.yaml"
    path.write_text(json.dumps(document, indent=1))
    return path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, spec):
    return Undisturbed(tmp_path_factory.mktemp("local"), spec)


def check(person: Login, undisturbed: Undisturbed, run_id: str) -> None:
    assert losses(person.there, run_id) == undisturbed.losses
    assert last_digest(person.there, run_id) == undisturbed.digest


def test_one_spec_everywhere(person, hold, spec, undisturbed):
    """Rank processes have the same argv and environment; losses are the same to the bit."""
    with hold:
        person.submit(spec, "anywhere")
        there = workers_of("anywhere", 2)
        profiled = person.json("profile", "anywhere", "--steps", "1")
    assert [rank["rank"] for rank in profiled["ranks"]] == [0, 1]
    check_processes(undisturbed.workers, there)
    assert "train done" in " ".join(person.submit(spec, "anywhere", "--wait").split())
    check(person, undisturbed, "anywhere")
    person.submit(spec, "anywhere", "--wait")  # it is done: nothing starts
    listed = person.cluster.run("squeue", "--states=all", "--noheader", "--format=%j")
    assert listed.count("mlpipe/anywhere/") == 1


def test_what_slurm_refuses_leaves_no_run_and_what_waits_says_why(person, tmp_path):
    path = tmp_path / "command.yaml"
    stage = {"name": "c", "command": ["true"], "resources": {"cpus": 1}}
    document = {"version": 1, "name": "c", "stages": [stage], "slurm": {"partition": "nowhere"}}
    path.write_text(json.dumps(document))
    said = person("submit", str(path), "--to", "slurm", "--run-id", "nowhere", code=2).stderr
    assert "slurm.partition" in said
    assert not (person.store / "runs" / "nowhere").exists()
    document["slurm"] = {"options": {"begin-not": "x"}}
    path.write_text(json.dumps(document))
    assert "slurm.options" in person("submit", str(path), "--to", "slurm", code=2).stderr
    document["slurm"] = {"partition": "short", "time": "20 min"}
    path.write_text(json.dumps(document))
    person.submit(path, "too-long")
    person.until_note("too-long", "slurm.time", "c")
    assert person.json("cancel", "too-long")["state"] == "cancelled"
    assert "too-long" not in person.cluster.run("squeue", "--noheader", "--format=%j")


def test_a_node_that_does_not_pass_the_preflight_is_left_out_of_the_next_attempt(person, hold, tmp_path):
    """Of two nodes nobody can tell whose link is slow: the second is left out, and the first passes with the
    third."""
    person.cluster.slow_down("n2", "1mbit")
    limits = {"slow_ratio": 0.001, "clock": "1 h", "link_gb_per_second": 0.002}
    resources = {"nodes": 2, "cpus": 1, "memory": "2 GiB", "preflight": limits}
    document = {"version": 1, "name": "p", "slurm": {"time": "30 min"}}
    path = tmp_path / "preflight.json"
    path.write_text(json.dumps(document | {"stages": [training(hold.model, resources)]}))
    try:
        person.submit(path, "preflight", "--wait")
    finally:
        person.cluster.slow_down("n2", "10gbit")
    first, second = (f"runs/preflight/stages/train/attempt-{number}" for number in (1, 2))
    pairs = read_checked(person.there, first).pairs
    assert [pair[:2] for pair in pairs] == [("n1", "n2")]
    assert "their link has 0." in pairs[0][2]
    assert json.loads(person.there.get(f"{second}/plan.json"))["launch"]["avoid"] == ["n2"]
    assert set(read_checked(person.there, second).nodes) == {"n1", "n3"}
    assert runs.read_run(person.there, "preflight").stages["train"].state == "done"


def test_of_groups_of_machines_a_cancel_saves_and_one_by_hand_is_a_cancel_too(
    person, hold, spec, undisturbed
):
    """A heterogeneous job: one node has half of each batch, two have the rest. It is queued again, and each
    time its ranks are where the plan has them."""
    document = json.loads(spec.read_text())
    one = document["stages"][0]["resources"] | {"nodes": 1}
    document["stages"][0]["resources"] = [
        one | {"memory": "3 GiB", "speed": 2},  # more than a step of the others can have
        one | {"nodes": 2, "cpus": 2, "speed": 1},
    ]
    mixed = person.folder / "mixed.json"
    mixed.write_text(json.dumps(document))
    with hold:
        person.submit(mixed, "mixed")
        person.until_step("mixed", 1)
        job = person.job("mixed")
        person.cluster.run("scancel", "--batch", "--signal=USR1", job)  # as before the limit
        until(lambda: person.restarts(job) == 1, "its second start")
        first = person.last_saved("mixed")
        assert first >= 1
        person.until_step("mixed", first + 1)
        assert person.json("cancel", "mixed")["state"] == "cancelled"
        first = person.last_saved("mixed")
        resumed = person.start("resume", "mixed")
        person.until_step("mixed", first + 1, attempt=2)
        person.cluster.run("scancel", person.job("mixed"))  # every process is signalled: no rank saves
        resumed.communicate(timeout=300)
        assert resumed.returncode == 5
    assert person.json("status", "mixed")["state"] == "cancelled"
    assert person.last_saved("mixed") == first
    person("resume", "mixed")
    assert losses(person.there, "mixed") == pytest.approx(undisturbed.losses, rel=1e-6)
    key = "runs/mixed/stages/train/attempt-3"
    each = [read_records(person.there, key, rank) for rank in range(3)]
    assert [{one.tokens for one in lines if isinstance(one, Step)} for lines in each] == [{128}, {64}, {64}]
    hosts = [one.host for lines in each for one in lines if isinstance(one, Start)]
    listed = person.cluster.run("squeue", "--noheader", "--states=all", "--format=%j %N").splitlines()
    (second,) = [line.split()[1] for line in listed if line.startswith("group-1/mlpipe/mixed/train/3 ")]
    assert hosts[1:] == person.cluster.run("scontrol", "show", "hostnames", second).split() != hosts[:1]


def test_a_limit_a_dead_driver_preemption_and_a_lost_node_lose_nothing(person, hold, spec, undisturbed):
    cluster = person.cluster
    with hold:
        person.submit(spec, "faults")
        person.until_step("faults", 2)
        job = person.job("faults")
        # the driver dies, and what Slurm sends before the limit comes
        driver = runs.read_run(person.there, "faults").driver
        cluster.run("kill", "-9", driver.pid)
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        until(lambda: person.last_saved("faults") >= 2, "a save before the limit")
        saved = person.last_saved("faults")
        waiting = person.start("submit", str(spec), "--to", "slurm", "--run-id", "faults", "--wait")
        person.until_step("faults", saved + 1)  # the next driver found it, and let it start again
        assert (person.job("faults"), person.restarts(job)) == (job, 1)
        # a command that has been queued again as often as it may, whose script Slurm does not signal
        begun = person.folder / "begun"
        argv = ["sh", "-c", f"echo x >> {begun}; exec sleep 1000"]
        stage = {"name": "c", "command": argv, "resources": {"cpus": 1, "memory": "1 GiB"}}
        document = {"version": 1, "name": "c", "slurm": {"max_requeues": 1}, "stages": [stage]}
        command = person.folder / "command.yaml"
        command.write_text(json.dumps(document))
        person.submit(command, "patient")
        until(begun.exists, "the command")
        patient = person.job("patient")
        cluster.run("scontrol", "requeue", patient)
        until(lambda: begun.read_text().count("x") == 2, "its second start")
        # a job of a higher priority takes all nodes: Slurm signals the script as it does before the limit,
        # and of what has asked for no signal the processes
        urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 600")
        other = cluster.run("sbatch", "--parsable", *urgent).strip()
        until(lambda: person.restarts(job) == 2, "the job to be preempted")
        until(lambda: person.restarts(patient) == 2, "the command to be preempted")
        assert person.last_saved("faults") > saved
        saved = person.last_saved("faults")
        cluster.run("scancel", other)
        person.until_step("faults", saved + 1)
        until(lambda: begun.read_text().count("x") == 3, "its third start")
        assert person.json("cancel", "patient")["state"] == "cancelled"
        restarts = person.restarts(job)
        lost = cluster.nodes_of(job)[1]
        cluster.kill_node(lost)
        until(lambda: person.restarts(job) > restarts, "another start of the job")
    out, err = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, err + out
    assert runs.read_run(person.there, "faults").stages["train"].attempt == 1
    check(person, undisturbed, "faults")
    cluster.start_node(lost)


def test_of_an_array_trials_are_lost_cancelled_and_fail_and_the_others_never_know(
    person, hold, spec, undisturbed
):
    """Two trials at a time; the first has seed 0, and is the run that nothing befell: a rank of it is killed.
    The second is cancelled, the fourth by Slurm's own command before it began, the fifth fails, the last one
    is cancelled before it began, and the process that drives the sweep is killed."""
    document = json.loads(spec.read_text())
    model = {**hold.model, "args": {**hold.model["args"], "fails": 4}}
    document["stages"] = [training(model, {"nodes": 1, "workers_per_node": 2, "cpus": 2, "memory": "2 GiB"})]
    document["sweep"] = {"over": {"seed": "0..5"}, "max_parallel": 2, "metric": {"name": "loss"}}
    swept = person.folder / "swept.yaml"
    swept.write_text(json.dumps(document))
    with hold:
        driver = person.start(
            "sweep", str(swept), "--to", "slurm", "--sweep-id", "swept", start_new_session=True
        )
        for trial in ("swept-000", "swept-001"):
            person.until_step(trial, 2)
        array = person.job("swept")
        assert person.waiting(array) == {f"{array}_{number}" for number in (2, 3, 4, 5)}
        assert "sweep.max_parallel" in runs.read_run(person.there, "swept").stages["002"].message
        person.cluster.run("scancel", f"{array}_3")
        assert person.json("cancel", "swept-005")["state"] == "cancelled"
        assert person.waiting(array) == {f"{array}_2", f"{array}_4"}
        os.kill(ranks("swept-000")[0][0], signal.SIGKILL)
        assert person.json("cancel", "swept-001")["state"] == "cancelled"
        os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
        until(lambda: person.restarts(f"{array}_0") == 1, "the first trial's job to start again")
    bad = ["cancelled", "failed", "cancelled"]
    done = person.json("sweep", "--resume", "swept")
    assert [one["state"] for one in done["trials"]] == ["done", "cancelled", "done", *bad]
    person("resume", "swept-001")
    done = person.json("sweep", "--resume", "swept")
    assert [one["state"] for one in done["trials"]] == ["done"] * 3 + bad
    names = person.cluster.run("squeue", "--array", "--states=all", "--noheader", "--format=%j").split()
    jobs = {name: names.count(name) for name in names if name.startswith("mlpipe/swept")}
    assert jobs == {"mlpipe/swept/train/1": 4, "mlpipe/swept-001/train/2": 1}, (
        "one array, and what was resumed"
    )
    check(person, undisturbed, "swept-000")
    found = [losses(person.there, f"swept-00{number}") for number in range(3)]
    assert [sorted(one) for one in found] == [sorted(undisturbed.losses)] * 3
    values = [one["value"] for one in done["trials"][:3]]
    assert len(set(values)) == 3
    assert done["best"] == f"00{values.index(min(values))}"
    assert [runs.read_run(person.there, f"swept-00{n}").stages["train"].attempt for n in range(3)] == [
        1,
        2,
        1,
    ]


def test_of_an_elastic_training_a_node_is_lost_and_the_others_go_on(person, hold):
    """Of three replicas a rank is killed; one is slow, and leaves for another node, of which there is none;
    one fewer is wanted; a node is lost, and Slurm takes another one for its replica. The others never start
    again. Then all are cancelled."""
    cluster, key = person.cluster, "runs/coming/stages/train/attempt-1"
    # five of eight cores: a node for each, and room for the coordinator
    resources = {"nodes": "2..3", "workers_per_node": 1, "cpus": 5, "memory": "2 GiB"}
    changes = {"steps": 400, "strategy": "single", "deterministic": False}
    model = {**hold.model, "args": {**hold.model["args"], "lame": "2", "lame_seconds": 0.2}}
    stage = training(model, resources, checkpoint={"every": "1000 steps"}, **changes)
    path = person.folder / "coming.json"
    document = {"version": 1, "name": "p", "slurm": {"time": "30 min"}, "stages": [stage]}
    path.write_text(json.dumps(document))

    def members() -> list[list[int]]:
        data, _ = person.there.read_log(f"{key}/events.jsonl")
        found = [one for one in decode_lines(data.split(b"\n")) if isinstance(one, Membership)]
        return [sorted(one.members or []) for one in found]

    def jobs() -> dict[str, str]:
        lines = cluster.run("squeue", "--noheader", "--format=%j %A").splitlines()
        found = dict(line.split() for line in lines if line.startswith("mlpipe/coming/"))
        return {name.rpartition("/")[2]: number for name, number in found.items()}

    with hold:
        person.submit(path, "coming")
        until(lambda: [0, 1, 2] in members(), "three replicas")
        person.until_step("coming", 1)
        before = len(members())
        (victim,) = (pid for pid, _, _, env in ranks("coming") if env["MLPIPE_REPLICA"] == "1")
        os.kill(victim, signal.SIGKILL)
        until(lambda: [0, 1, 2] in members()[before:], "the one that was killed")
        slow = cluster.nodes_of(jobs()["2"])[0]
        hold.release()
        until(lambda: members()[-1] == [0, 1], "the slow one has left")
        hold.path.touch()
        excluded = f"ExcNodeList={slow}"
        until(
            lambda: "2" in (now := jobs()) and excluded in cluster.run("scontrol", "show", "job", now["2"]),
            "its next job",
        )
        person("scale", "coming", "--nodes", "2")
        until(lambda: members()[-1] == [0, 1] and "2" not in jobs(), "one fewer")
        before, lost = len(members()), cluster.nodes_of(jobs()["1"])[0]
        cluster.kill_node(lost)
        until(lambda: [0, 1] in members()[before:], "the replica of the lost node, on another one")
        assert cluster.nodes_of(jobs()["1"]) != [lost]
        assert person.restarts(jobs()["1"]) >= 1
        assert person.json("cancel", "coming")["state"] == "cancelled"
    assert not jobs()
    assert person.last_saved("coming") > 1
    found = {rank: read_records(person.there, key, rank) for rank in range(2)}
    starts = {rank: [one for one in found[rank] if isinstance(one, Start)] for rank in found}
    assert len(starts[0]) == 1, "it began once"
    assert len(starts[1]) == 3
    assert {one.resumed_from for lines in starts.values() for one in lines} == {None}, "healed by a peer"


def test_a_command_on_two_nodes_meets_and_ends_together(person, tmp_path):
    """Of JAX, each with two GPUs of a class, which are null devices; then of torch, of which one fails."""
    run = 'echo $CUDA_VISIBLE_DEVICES > "$2/gpus"; JAX_PLATFORMS=cpu exec python "$1" "$2"'
    command = ["sh", "-c", run, "-", meet_jax.__file__, "{{output}}"]
    resources = {"nodes": 2, "cpus": 1, "memory": "2 GiB", "gpus_per_node": 2, "gpu": "H100-80GB"}
    stage = {"name": "c", "command": command, "resources": resources}
    document = {
        "version": 1,
        "name": "gang",
        "slurm": {"time": "30 min", "gpu_type": "h100"},
        "stages": [stage],
    }
    path = tmp_path / "gang.json"
    path.write_text(json.dumps(document))
    person.submit(path, "together", "--wait")
    made = person.store / "runs/together/stages/c/outputs/files"
    assert ((made / "total").read_text(), (made / "gpus").read_text()) == ("3.0 0", "0,1\n")
    command[:] = [sys.executable, meet.__file__, "{{output}}", "1"]
    del resources["gpus_per_node"], resources["gpu"]
    path.write_text(json.dumps(document))
    said = person("submit", str(path), "--to", "slurm", "--run-id", "broken", "--wait", code=3).stderr
    assert "broken" in said
    assert not (person.store / "runs/broken/stages/c/outputs").exists()


def test_trials_of_a_tuning_are_jobs_and_a_second_command_goes_on(person, hold, tmp_path):
    """One change, on two nodes: of micro-batches half as large. The first command is stopped in its trial."""
    resources = {"nodes": 2, "cpus": 1, "memory": "2 GiB"}
    stage = training({"preset": "llama-1m"}, resources)
    stage["train"]["data"]["batch_size"] = 4
    document = {"version": 1, "name": "tuned", "slurm": {"time": "30 min"}, "stages": [stage]}
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps(document))
    argv = ("tune", str(path), "--only", "micro_batch", "--steps", "6", "--out", str(tmp_path / "tune.json"))

    def jobs(*states: str) -> str:
        options = ("--noheader", f"--states={','.join(states)}", "--format=%j")
        return person.cluster.run("squeue", *options)

    first = person.start(*argv)
    until(lambda: "-tune-" in jobs("RUNNING"), "the first trial")
    os.kill(processes.tree(first.pid)[1], signal.SIGINT)  # the first is nsenter
    first.communicate(timeout=300)
    assert "-tune-" not in jobs("PENDING", "RUNNING")
    assert "micro_batch=1" in person(*argv).stdout
    found = json.loads((tmp_path / "tune.json").read_bytes())
    assert found["is_complete"]
    smaller = ["stages.train.train.data.micro_batch=1"]
    assert {len(trial["sets"]) for trial in found["trials"]} == {0, 1}
    assert all(trial["seconds"] > 0 and trial["sets"] in ([], smaller) for trial in found["trials"])
    (run,) = [one for one in runs.list_runs(person.there) if "-tune-" in one.run_id]
    assert run.state == "done"
    assert catalogue.latest(person.there, f"runs/{run.run_id}/stages/train") is None, "nothing is kept"
