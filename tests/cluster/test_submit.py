"""`mlpipe submit --to kubernetes` on a real cluster: the run of a laptop, whatever befalls its pods."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from kit import processes
from kit.command_runs import Cli
from kit.place import BUCKET, ROOT, STEPS, Place

from mlpipe.observe.records import read_records
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500)]
SLOW = {"entry": "kit.models:slow", "args": {"seconds": 0.25, "dropout": 0.0}}
STAGE = "stages/train"
# torchrun's own variables, and what tells one machine from another
OWN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT", "ROLE_NAME")
OWN += ("LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "TORCHELASTIC_", "TORCH_")
OWN += (
    "HOSTNAME",
    "HOME",
    "USER",
    "PATH",
    "LANG",
    "PWD",
    "SHLVL",
    "_",
    "KUBERNETES_",
    "AWS_",
    "JOB_COMPLETION_",
)
PLACES = ("MLPIPE_PLAN", "MLPIPE_SCRATCH", "MLPIPE_CACHE")  # the same names, other folders
POD_ONLY = ("MLPIPE_POD_NAME", "MLPIPE_NODE_NAME", "MLPIPE_RENDEZVOUS", "MLPIPE_GANG_RESTART")
POD_ONLY += ("MLPIPE_METRICS_ADDRESS", "MLPIPE_METRICS_PORT")


@pytest.fixture(scope="module")
def place(running, tmp_path_factory):
    running.make_bucket(BUCKET)
    return Place(running, tmp_path_factory.mktemp("place"))


def local(folder: Path, spec: Path) -> Cli:
    cli = Cli(folder)
    cli.env["PATH"] = os.environ["PATH"]
    workers = [
        "--set",
        "stages.train.resources.workers_per_node=2",
        "--set",
        "stages.train.resources.nodes=1",
    ]
    process = cli.start("run", str(spec), "--run-id", "r", *workers)
    cli.running = process
    cli.workers = workers_of("r", 2)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err + out
    return cli


def workers_of(run_id: str, count: int) -> dict[int, tuple[list[str], dict[str, str]]]:
    """argv and environment by rank, of the rank processes of a run on this machine, in a pod or not."""
    from kit.command_runs import until

    def seen():
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                argv = (path / "cmdline").read_text().split("\0")[:-1]
                if "mlpipe.train.worker" not in argv or "torch.distributed.run" in argv:
                    continue
                lines = (path / "environ").read_text().split("\0")
            except OSError:
                continue
            env = dict(line.split("=", 1) for line in lines if "=" in line)
            if env.get("MLPIPE_RUN_ID") == run_id and "RANK" in env:
                found[int(env["RANK"])] = (argv, env)
        return found if len(found) == count else None

    return until(seen, f"{count} workers of {run_id}", 240)


@pytest.fixture(scope="module")
def undisturbed(place, tmp_path_factory):
    """The spec run on this machine: its losses, the digest of its last weights, its rank processes."""
    spec = place.spec("everywhere", model=SLOW)
    cli = local(tmp_path_factory.mktemp("local"), spec)
    store = FolderStore(cli.store)
    return spec, losses(store, "r"), last_digest(store, "r"), cli.workers


def losses(store, run_id: str) -> list[float]:
    found = {}
    attempt = 1
    while records := read_records(store, f"runs/{run_id}/{STAGE}/attempt-{attempt}", 0):
        found |= {record["step"]: record["loss"] for record in records if record["kind"] == "step"}
        attempt += 1
    return [found[step] for step in sorted(found)]


def last_digest(store, run_id: str) -> str:
    last = catalogue.latest(store, f"runs/{run_id}/{STAGE}")
    assert last.step == STEPS
    return processes.digest_of(store, last.key)


def check_undisturbed(place: Place, run_id: str, undisturbed) -> None:
    with place.cluster.inside():
        store = place.store()
        assert losses(store, run_id) == undisturbed[1]
        assert last_digest(store, run_id) == undisturbed[2]


def test_one_spec_everywhere(place, undisturbed):
    """Rank processes have the same argv and environment on both backends; so have the losses, to the bit."""
    spec, _, _, here = undisturbed
    place.submit(spec, "everywhere")
    there = workers_of("everywhere", 2)
    for rank in (0, 1):
        assert there[rank][0] == here[rank][0]
        ours, theirs = (
            {
                name: value
                for name, value in env.items()
                if not name.startswith(OWN) and name not in (*PLACES, "MLPIPE_RUN_ID")
            }
            for env in (here[rank][1], there[rank][1])
        )
        inherited = os.environ.keys()
        ours = {name: value for name, value in ours.items() if name not in inherited or name in theirs}
        ours.pop("MLPIPE_DRIVER", None)
        ours.pop("MLPIPE_STORE", None)
        assert ours == {name: value for name, value in theirs.items() if name not in POD_ONLY}
    done = place.submit(spec, "everywhere", "--wait")
    assert "train  done" in done
    check_undisturbed(place, "everywhere", undisturbed)
    assert place.run_state("everywhere").stages["train"].attempt == 1
    # a second submit of a run that is done starts nothing
    place.submit(spec, "everywhere", "--wait")
    assert len(place.objects("jobsets", "everywhere")) == 1


def evict(place: Place, run_id: str) -> None:
    name = place.worker_pods(run_id)[1]["metadata"]["name"]
    body = (
        f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{name}",'
        f'"namespace":"{place.namespace}"}}}}'
    )
    url = f"/api/v1/namespaces/{place.namespace}/pods/{name}/eviction"
    place.cluster.kubectl("create", "--raw", url, "-f", "-", stdin=body)


def kill_rank(place: Place, run_id: str) -> None:
    pid = next(
        pid for pid in pids("mlpipe.train.worker", run_id) if "torch.distributed.run" not in argv_of(pid)
    )
    os.kill(pid, signal.SIGKILL)


def kill_driver(place: Place, run_id: str) -> None:
    name = place.objects("pods", run_id, **{"app.kubernetes.io/component": "driver"})[0]["metadata"]["name"]
    place.cluster.kubectl("-n", place.namespace, "delete", "pod", name, "--grace-period=0", "--force")


def restart_apiserver(place: Place, run_id: str) -> None:
    place.cluster.restart_apiserver()


def argv_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def pids(word: str, run_id: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if word in (path / "cmdline").read_text() and (
                f"MLPIPE_RUN_ID={run_id}\0" in (path / "environ").read_text()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("fault", [evict, kill_rank, kill_driver, restart_apiserver])
def test_a_fault_during_the_training_changes_nothing_in_its_result(
    place: Place, undisturbed, fault: Callable[[Place, str], None]
):
    run_id = fault.__name__.replace("_", "-")
    place.submit(undisturbed[0], run_id)
    place.until_step(run_id, 6)
    fault(place, run_id)
    place.submit(undisturbed[0], run_id, "--wait")
    check_undisturbed(place, run_id, undisturbed)
    assert place.run_state(run_id).stages["train"].attempt == 1
    jobset = place.objects("jobsets", run_id)[0]
    restarted = fault in (evict, kill_rank)
    assert jobset["status"].get("restarts", 0) == int(restarted)
    # a disruption is free, a crash counts
    counted = jobset["status"].get("restartsCountTowardsMax", 0)
    assert counted == int(fault is kill_rank)


def test_a_bug_ends_the_run_at_once_with_its_own_words(place):
    model = {"entry": "kit.models:misbehaving", "args": {"what": "raise", "at": 4, "rank": 1}}
    spec = place.spec("bug", model=model)
    said = place.mlpipe("submit", spec, "--to", "kubernetes", "--run-id", "bug", "--wait", code=3)
    assert "this model does not like this batch" in said.stdout
    assert place.objects("jobsets", "bug")[0]["status"].get("restarts", 0) == 0
    logs = place.mlpipe("logs", "bug", "--rank", "1").stdout
    assert "this model does not like this batch" in logs


def test_cancel_saves_and_resume_goes_on_under_another_strategy_and_size(place):
    spec = place.spec("cancelled", model=SLOW, checkpoint={"every": "1000 steps"})
    place.submit(spec, "cancelled")
    place.until_step("cancelled", 3)
    said = place.mlpipe("cancel", "cancelled").stdout
    assert "train is saved at step" in said
    assert place.objects("pods", "cancelled", **{"mlpipe.dev/stage": "train"}) == []
    place.mlpipe(
        "resume", "cancelled", "--set", "train.strategy=fsdp", "--set", "train.resources.workers_per_node=2"
    )
    state = place.run_state("cancelled")
    assert (state.state, state.stages["train"].attempt) == ("done", 2)
    with place.cluster.inside():
        start = next(
            record
            for record in read_records(place.store(), "runs/cancelled/stages/train/attempt-2", 0)
            if record["kind"] == "start"
        )
    assert (start["strategy"], start["world_size"]) == ("fsdp", 4)
    assert start["start_step"] >= 3


PENDING = {
    "cores": ({"resources": {"cpus": 500}}, "Insufficient cpu"),
    "gpus": ({"resources": {"gpus_per_node": 8, "gpu": "H100-80GB"}}, "gpu"),
    "claim": ({"kubernetes": {"volumes": [{"claim": "none", "path": "/data"}]}}, "make the claim"),
    "secret": ({"kubernetes": {"env_from": [{"secret": "none"}]}}, "not found"),
}


def waits_for(place: Place, run_id: str) -> str:
    found = place.json("status", run_id)
    return f"{found.get('waits_for') or ''} {found['stages']['train']['message']}"


@pytest.mark.parametrize("case", PENDING)
def test_status_says_why_it_is_pending(place, case):
    changes, words = PENDING[case]
    run_id = f"pending-{case}"
    place.submit(place.spec(run_id, model=SLOW, nodes=1, **changes), run_id)
    place.until(f"the reason why {case} waits", lambda: words in waits_for(place, run_id), 120)
    place.mlpipe("cancel", run_id)
    assert place.worker_pods(run_id) == []


def test_an_image_that_is_not_there_is_told_of_the_driver(place):
    spec = place.spec("no-image", model=SLOW)
    missing = "registry.invalid/none@sha256:" + "0" * 64
    place.submit(spec, "no-image", "--set", f"image={missing}")
    place.until("the reason", lambda: "cannot be pulled" in waits_for(place, "no-image"), 120)
    place.mlpipe("cancel", "no-image")


def test_the_whole_quickstart(place):
    """Command, training on two pods, evaluation and promotion; the report; logs of every stage."""
    argv = ["submit", ROOT / "pipelines" / "quickstart.yaml", "--to", "kubernetes", "--wait"]
    changes = {
        "image": place.cluster.image.name,
        "store": place.environment["MLPIPE_STORE"],
        "kubernetes.store.endpoint": place.cluster.minio.endpoint,
        "train.resources.nodes": 2,
        "train.resources.workers_per_node": 1,
        "train.resources.cpus": 0.5,  # two of them and the driver on a machine of two cores
        "train.train.model.preset": "llama-1m",
        "train.train.steps": 30,
        "train.train.strategy": "fsdp",
        "evaluate.gate": "val_bits_per_byte < 8",
    }
    for key, value in changes.items():
        argv += ["--set", f"{key}={value}"]
    done = place.mlpipe(*argv, "--run-id", "quick")
    assert "report" in done.stdout
    assert "validation loss" in done.stdout
    with place.cluster.inside():
        store = place.store()
        assert store.exists("runs/quick/report.html")
        assert catalogue.latest(store, "runs/quick/stages/train").step == 30
    assert "stdlib-lm" in place.mlpipe("models", "list").stdout


def test_a_store_that_is_away_for_20_seconds_is_waited_for(place, undisturbed):
    place.submit(undisturbed[0], "away")
    place.until_step("away", 5)
    place.cluster.stop_minio()
    time.sleep(20)  # the length of the fault, not a wait for anything
    place.cluster.start_minio()
    place.submit(undisturbed[0], "away", "--wait")
    check_undisturbed(place, "away", undisturbed)


def test_out_of_memory_is_named(place):
    model = {"entry": "kit.models:greedy", "args": {"num_bytes": 4 * 2**30}}
    spec = place.spec("greedy", model=model, nodes=1, kubernetes={"max_gang_restarts": 0})
    place.submit(spec, "greedy", "--wait", code=4)
    message = place.run_state("greedy").stages["train"].message
    assert "out of memory" in message
    assert "resources.memory" in message or "mlpipe plan" in message


def test_a_node_that_is_lost_for_good_is_given_up(place, undisturbed):
    """The last test here: the cluster has a dead node afterwards."""
    index = len(place.cluster.nodes)
    place.cluster.add_node()
    short = {"operator": "Exists", "effect": "NoExecute", "toleration_seconds": 3}
    tolerations = [{"key": f"node.kubernetes.io/{state}", **short} for state in ("unreachable", "not-ready")]
    spec = place.spec("lost", model=SLOW, kubernetes={"tolerations": tolerations})
    place.submit(spec, "lost")
    place.until_step("lost", 6)
    nodes = [pod["spec"]["nodeName"] for pod in place.worker_pods("lost")]
    assert len(set(nodes)) == 2, nodes
    place.cluster.kill_node(index)
    place.submit(spec, "lost", "--wait")
    check_undisturbed(place, "lost", undisturbed)
    # Either JobSet could restart the gang, or its attempt was given up and fenced, and the next one went on.
    with place.cluster.inside():
        keys = [info.key for info in place.store().list("runs/lost/stages/train/checkpoints")]
    attempt = place.run_state("lost").stages["train"].attempt
    assert any("/fence-1-" in key for key in keys) == (attempt == 2)
