"""`mlpipe submit --to kubernetes` on a real cluster: as on a laptop; a bug, too little memory, a cancel."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
from kit import budget
from kit.cluster_objects import named
from kit.command_runs import until
from kit.place import ROOT, RUN_SECONDS
from kit.undisturbed import check_processes, losses, workers_of

from mlpipe._core.records import Start, Step
from mlpipe.observe.records import read_records
from mlpipe.store import catalogue

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_one_spec_everywhere(place, hold, undisturbed):
    """Rank processes have the same argv and environment on both backends; so have the losses, to the bit."""
    before = len(place.cluster.control.requests("mlpipe-driver"))
    with hold:
        place.submit(undisturbed.spec, "everywhere")
        there = workers_of("everywhere", 2)
        until(lambda: place.run_state("everywhere").stages["train"].state == "running", "the driver's word")
        profiled = place.json("profile", "everywhere", "--steps", "1")
    assert [rank["rank"] for rank in profiled["ranks"]] == [0, 1]
    assert all(trace.startswith("s3://") for trace in profiled["traces"])
    check_processes(undisturbed.workers, there)
    done = place.submit(undisturbed.spec, "everywhere", "--wait")
    assert "train  done" in done
    undisturbed.check(place, "everywhere")
    assert place.run_state("everywhere").stages["train"].attempt == 1
    # a driver watches: what it asks for does not grow with the length of the run
    asked = place.cluster.control.requests("mlpipe-driver")[before:]
    budget.within("API requests of a run", {"driver of a stage, in a real cluster": len(asked)})
    # a second submit of a run that is done starts nothing
    place.submit(undisturbed.spec, "everywhere", "--wait")
    assert len(place.objects("jobsets", "everywhere")) == 1


def test_groups_of_machines_meet_and_train_as_one_machine_does(place, undisturbed):
    """A job of the JobSet for each group, one of them three times as fast: it has six of eight samples."""
    document = json.loads(undisturbed.spec.read_text())
    (stage,) = document["stages"]
    stage["resources"] |= {"nodes": 1, "speed": 3}
    stage["resources"] = [stage["resources"], stage["resources"] | {"speed": 1}]
    spec = place.folder / "groups.json"
    spec.write_text(json.dumps(document))
    place.submit(spec, "groups", "--wait")
    (gang,) = place.objects("jobsets", "groups")
    assert [job["template"]["spec"]["completions"] for job in gang["spec"]["replicatedJobs"]] == [1, 1]
    with place.cluster.inside():
        found = losses(place.store(), "groups")
        key = "runs/groups/stages/train/attempt-1"
        ranks = [read_records(place.store(), key, rank) for rank in range(2)]
    assert found == pytest.approx(undisturbed.losses, rel=1e-5)
    tokens = [{one.tokens for one in lines if isinstance(one, Step)} for lines in ranks]
    assert sorted(map(sorted, tokens)) == [[2 * 32], [6 * 32]]


def test_a_bug_ends_the_run_at_once_with_its_own_words(place):
    model = {"entry": "kit.models:misbehaving", "args": {"what": "raise", "at": 4, "rank": 1}}
    spec = place.spec("bug", model=model)
    said = place.mlpipe("submit", spec, "--to", "kubernetes", "--run-id", "bug", "--wait", code=3)
    assert "this model does not like this batch" in said.stdout
    assert place.objects("jobsets", "bug")[0]["status"].get("restarts", 0) == 0
    logs = place.mlpipe("logs", "bug", "--rank", "1").stdout
    assert "this model does not like this batch" in logs
    # three who resume it at once make one more attempt
    several = [place.start("resume", "bug") for _ in range(3)]
    assert [one.wait(RUN_SECONDS) for one in several] == [3, 3, 3]
    assert place.run_state("bug").stages["train"].attempt == 2


def test_cancel_saves_and_resume_goes_on_under_another_strategy_and_size(place, hold):
    """Whatever somebody else with the store's keys has tried meanwhile."""
    # longer than what is tried meanwhile takes on a busy machine
    spec = place.spec("cancelled", model=hold.model, steps=100, checkpoint={"every": "1000 steps"})
    with hold:
        place.submit(spec, "cancelled")
        place.until_step("cancelled", 3)
        (driver,) = drivers(place, "cancelled")
        with rewritten(
            place, "runs/cancelled/pipeline.yaml", '"deterministic"', '"metrics_port": 1, "deterministic"'
        ):
            place.cluster.kubectl("-n", place.namespace, "delete", "pod", driver["metadata"]["name"])
            assert "it was submitted: pipeline.yaml" in refusal(place, "cancelled")
            assert "train.metrics_port" in place.mlpipe("resume", "cancelled", code=2).stderr
        plan = "runs/cancelled/stages/train/attempt-1/plan.json"
        with rewritten(
            place, plan, '"service_account": "mlpipe-worker"', '"service_account": "mlpipe-driver"'
        ):
            place.submit(spec, "cancelled")
            assert "cluster.service_account" in refusal(place, "cancelled")
        assert len(place.objects("jobsets", "cancelled")) == 1  # which trains on
        assert len(place.worker_pods("cancelled")) == 2
        said = place.mlpipe("cancel", "cancelled").stdout
    assert "train is saved at step" in said
    assert place.objects("pods", "cancelled", **{"mlpipe.dev/stage": "train"}) == []
    other = ("strategy=fsdp", "resources.nodes=1", "resources.workers_per_node=4")
    place.mlpipe("resume", "cancelled", *(f"--set=train.{one}" for one in other))
    state = place.run_state("cancelled")
    assert (state.state, state.stages["train"].attempt) == ("done", 2)
    with place.cluster.inside():
        start = next(
            record
            for record in read_records(place.store(), "runs/cancelled/stages/train/attempt-2", 0)
            if isinstance(record, Start)
        )
    assert (start.strategy, start.world_size) == ("fsdp", 4)
    assert start.start_step >= 3


def drivers(place, run_id):
    """Its pods."""
    return place.objects("pods", run_id, **{"app.kubernetes.io/component": "driver"})


@contextmanager
def rewritten(place, key, old, new):
    """As anybody with the keys to the bucket can."""
    with place.cluster.inside():
        text = place.store().get(key)
        assert old.encode() in text
        place.store().put(key, text.replace(old.encode(), new.encode()))
    yield
    with place.cluster.inside():
        place.store().put(key, text)


def refusal(place, run_id):
    """What the last driver said; its Job has ended, and makes no other."""

    def failed():
        (job,) = place.objects("jobs", run_id, **{"app.kubernetes.io/component": "driver"})
        found = {one["type"]: one["status"] for one in job.get("status", {}).get("conditions", [])}
        return found.get("Failed") == "True"

    place.until("the driver's Job to end", failed)
    codes = {
        pod["metadata"]["name"]: one["state"]["terminated"]["exitCode"]
        for pod in drivers(place, run_id)
        for one in pod["status"].get("containerStatuses", [])
        if "terminated" in one["state"]
    }
    (name,) = [name for name, code in codes.items() if code == 2]
    return place.cluster.kubectl("-n", place.namespace, "logs", name)


def test_the_whole_quickstart(guarded):
    """Command, training on two pods, evaluation and promotion; the report; logs of every stage. No pod has
    keys of the store: each is lent some for the token of its ServiceAccount, which the API server signs. Only
    the driver has the account that may write models (the guard-rails hold), and it promotes by itself. Each
    pod has a disk of its own, and a cache outlives them; nodes fetch the image ahead."""
    guarded.policies()
    disks = Disks(guarded)
    argv = ["submit", ROOT / "pipelines" / "quickstart.yaml", "--to", "kubernetes", "--wait"]
    changes = {
        "image": guarded.cluster.image.name,
        "store": guarded.environment["MLPIPE_STORE"],
        "kubernetes.store": json.dumps({"endpoint": guarded.cluster.minio.endpoint, "web_identity": {}}),
        "kubernetes.scratch": json.dumps({"size": "1 GiB", "storage_class": disks.name}),
        "kubernetes.cache": json.dumps({"claim": disks.claim, "sub_path": "warm"}),
        "kubernetes.prepull": "true",
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
    done = guarded.mlpipe(*argv, "--run-id", "quick")
    assert "report" in done.stdout
    assert "validation loss" in done.stdout
    with guarded.cluster.inside():
        store = guarded.store()
        assert store.exists("runs/quick/report.html")
        assert catalogue.latest(store, "runs/quick/stages/train").step == 30
    assert "stdlib-lm" in guarded.mlpipe("models", "list").stdout
    stages = {pod["metadata"]["labels"].get("mlpipe.dev/stage") for pod in guarded.objects("pods", "quick")}
    assert stages == {None, "corpus", "train", "evaluate"}
    containers = [pod["spec"]["containers"][0] for pod in guarded.objects("pods", "quick")]
    variables = {one["name"] for container in containers for one in container.get("env", ())}
    assert "AWS_WEB_IDENTITY_TOKEN_FILE" in variables
    assert not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} & variables
    # of train and evaluate, whose pods may stand on the same nodes
    (pulled,) = [one for one in guarded.objects("jobs", "quick") if "-pull-" in one["metadata"]["name"]]
    assert pulled["status"]["succeeded"] == pulled["spec"]["completions"] == 2
    pods = [pod["metadata"] for pod in guarded.objects("pods", "quick")]
    workers = [pod for pod in pods if "mlpipe.dev/stage" in pod["labels"]]
    assert disks.owners() == {f"{pod['name']}-scratch": pod["uid"] for pod in workers}
    digest = guarded.run_state("quick").stages["corpus"].outcome["digest"]
    assert any((disks.cache / "warm").rglob(digest)), "the next pod finds what this one fetched"


class Disks:
    """Volumes of a place, in folders of this machine: for as many pods as a run may have, and for a cache.
    `name`: of their StorageClass. `claim`: on the cache."""

    def __init__(self, place):
        self._place, self.name, self.claim = place, place.namespace, "cache"
        self.cache = self._volume("cache", f"{self.name}-cache")
        for number in range(8):
            self._volume(str(number), self.name)
        spec = {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": f"{self.name}-cache",
            "resources": {"requests": {"storage": "1Gi"}},
        }
        place.cluster.apply(named("v1", "PersistentVolumeClaim", self.claim, self.name, spec=spec))

    def _volume(self, name, storage_class):
        folder = self._place.folder / f"disk-{name}"
        folder.mkdir()
        folder.chmod(0o777)
        spec = {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
            "storageClassName": storage_class,
            "hostPath": {"path": str(folder)},
        }
        self._place.cluster.apply(named("v1", "PersistentVolume", f"{self.name}-{name}", spec=spec))
        return folder

    def owners(self):
        """Uids of pods, by the claims that they own."""
        path = f"/api/v1/namespaces/{self._place.namespace}/persistentvolumeclaims"
        claims = [one["metadata"] for one in self._place.cluster.get(path)["items"]]
        owned = {one["name"]: one.get("ownerReferences", []) for one in claims}
        return {name: pod["uid"] for name, owners in owned.items() for pod in owners}


def test_out_of_memory_is_named(place):
    model = {"entry": "kit.models:greedy", "args": {"num_bytes": 4 * 2**30}}
    # with keys of this run's workers, and the driver with its own
    keys = {
        "secret": place.secret("greedy-worker", "worker", "greedy"),
        "driver_secret": place.secret("greedy-driver", "driver"),
        "endpoint": place.cluster.minio.endpoint,
    }
    spec = place.spec("greedy", model=model, nodes=1, kubernetes={"max_gang_restarts": 0, "store": keys})
    place.submit(spec, "greedy", "--wait", code=4)
    message = place.run_state("greedy").stages["train"].message
    assert "out of memory" in message
    assert "resources.memory" in message or "mlpipe plan" in message
    with place.cluster.inside():
        kept = json.loads(place.store().get("runs/greedy/stages/train/attempt-1/postmortem/cluster.json"))
    codes = [
        one["state"]["terminated"]["exitCode"]
        for pod in kept["pods"]
        for one in pod["status"]["containerStatuses"]
    ]
    assert codes == [4] or codes == [137]
