"""`submit --to auto`: what places are asked, and which one is chosen. Places are backends of the test's own;
what Kubernetes and Slurm say comes from stand-ins."""

from __future__ import annotations

import json
import stat
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kit.apiserver import Fault

from mlpipe._core.errors import SubmitError
from mlpipe.cli.app import app
from mlpipe.cli.session import CliSession
from mlpipe.plan.lasting import Lasting
from mlpipe.spec.load import load_pipeline_text
from mlpipe.spec.model import Resources
from mlpipe.spec.places import RunPlace, read_places
from mlpipe.spec.problems import SpecErrors
from mlpipe.submit import backends
from mlpipe.submit import places as asking
from mlpipe.submit.backend import Backend
from mlpipe.submit.kubernetes import KubernetesBackend
from mlpipe.submit.places import Answer, ask, choose
from mlpipe.submit.slurm import SlurmBackend
from mlpipe.submit.submission import Availability, Finding, Option, Submission

pytestmark = pytest.mark.unit
MODEL = {"preset": "llama-1m", "seq_len": 64}
TRAIN = {"model": MODEL, "data": {"tokens": "/tokens", "batch_size": 16}, "steps": 1000}


def submission(**resources: Any) -> Submission:
    stage = {"name": "a", "train": TRAIN, "resources": resources or {"gpus_per_node": 8, "gpu": "A100-80GB"}}
    gate = {"name": "b", "needs": ["a"], "evaluate": {"gate": "val_loss < 9"}}
    body = {"version": 1, "name": "p", "image": "r/i:1", "store": "s3://bucket/p", "stages": [stage, gate]}
    body |= {"slurm": {"time": "1 h"}}
    text = json.dumps(body)
    return Submission("p.yaml", text, (), load_pipeline_text(text, "p.yaml"), "s3://bucket/p", ".")


class Elsewhere(Backend):
    """By its option: what it does."""

    name = "elsewhere"
    trains_elsewhere = True
    options = (Option("--does", "WHAT", "What it does."),)
    let_go = threading.Event()

    def executor(self, *_: Any) -> Any:
        raise NotImplementedError

    def hardware(self, pipeline: Any, stage: str) -> Any:
        from mlpipe.plan.build import stage_hardware

        return stage_hardware(pipeline, stage, cluster=True)

    def check_plan(self, plan: Any) -> None:
        if self.place.get("does") == "no room":
            raise SubmitError("it has 4 GPUs", where=plan.stage)

    def doctor(self, store: Any) -> Any:
        yield Finding("token", "warn", "old")
        if self.place.get("does") == "not installed":
            yield Finding("tool", "fail", "it is not there")

    def availability(self, submission: Submission) -> Availability:
        does = self.place.get("does", "")
        if does == "hangs":
            assert self.let_go.wait(300)
        if does == "away":
            raise SubmitError("it does not answer", where="x")
        if does == "breaks":
            raise RuntimeError("its package")
        if does.startswith("waits "):
            return Availability(float(does.removeprefix("waits ")), "a queue")
        return Availability(None, "who knows", Lasting(7.0, 8.0) if does == "sells" else None)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(backends.TABLE, "elsewhere", f"{__name__}:Elsewhere")
    Elsewhere.let_go.clear()
    yield
    Elsewhere.let_go.set()


def place(does: str = "", name: str = "x", **more: Any) -> RunPlace:
    options = {"does": does} if does else {}
    return RunPlace.model_validate({"name": name, "backend": "elsewhere", "options": options, **more})


def test_each_place_says_why_not_or_when_and_for_how_much(elsewhere):
    does = ["no room", "not installed", "away", "breaks", "waits 60", "sells"]
    listed = [place(what, f"p{number}") for number, what in enumerate(does)]
    listed += [
        place("waits 0", "h100", resources={"gpu": "H100-80GB"}, usd_per_gpu_hour=1.0),
        place("waits 0", "unknown", resources={"gpu": "B999"}),
        place("waits 0", "odd", overrides=["a.stepz=4"]),
        place("waits 0", "moved", overrides=["store=s3://other"]),
    ]
    answers = ask(listed, submission())
    assert [one.place.name for one in answers] == [one.name for one in listed]
    said = {one.place.name: one.cannot for one in answers}
    assert [said[f"p{number}"] for number in range(6)] == [
        "a: it has 4 GPUs", "tool: it is not there", "x: it does not answer", "RuntimeError: its package",
        None, None,
    ]  # fmt: skip
    assert "unknown GPU 'B999'" in said["unknown"]
    assert "unknown key 'stepz'" in said["odd"]
    assert "store" in said["moved"]
    waits, sells, faster = (next(one for one in answers if one.place.name == n) for n in ("p4", "p5", "h100"))
    assert waits.done_seconds == 60 + waits.lasting.seconds
    assert (sells.done_seconds, sells.lasting) == (None, Lasting(7.0, 8.0))
    assert faster.lasting.seconds < waits.lasting.seconds
    assert faster.lasting.usd == pytest.approx(8 * faster.lasting.seconds / 3600)
    assert faster.submission.pipeline.stage("a").resources.gpu == "H100-80GB"


def test_a_place_that_hangs_holds_up_nobody(elsewhere):
    hanging, good = ask([place("hangs"), place("waits 1", "y")], submission(), deadline_seconds=5.0)
    assert (hanging.cannot, good.cannot) == ("it did not answer within 5 s", None)
    assert hanging.backend is None, "so that what it says later reaches nobody"


def test_what_the_command_line_sets_goes_before_what_a_place_does(elsewhere):
    asked = submission()
    asked = replace(asked, overrides=("a.resources.gpus_per_node=2",))
    (one,) = ask([place(resources={"gpus_per_node": 4, "nodes": 4})], asked)
    resources = one.submission.pipeline.stage("a").resources
    assert (resources.nodes, resources.gpus_per_node) == (4, 2)


def test_hardware_that_a_place_names_is_not_described_as_the_files(elsewhere):
    own = {"gpu": "mine", "gpus_per_node": 2, "workers_per_node": 2}
    own |= {"device": {"memory": "80 GiB", "fp32_tflops": 10}}
    (one,) = ask([place(resources={"gpu": "H100-80GB", "gpus_per_node": 4})], submission(**own))
    assert one.cannot is None
    resources = one.submission.pipeline.stage("a").resources
    assert resources == Resources(gpu="H100-80GB", gpus_per_node=4)


def test_a_place_that_says_which_gpus_it_has_takes_what_trains_on_cpus_too(elsewhere):
    asked = submission()
    document = json.loads(asked.text)
    document["stages"].append({"name": "c", "train": TRAIN, "resources": {"workers_per_node": 2}})
    text = json.dumps(document)
    asked = replace(asked, text=text, pipeline=load_pipeline_text(text, "p.yaml"))
    (one,) = ask([place(resources={"gpu": "H100-80GB", "nodes": 2})], asked)
    assert one.cannot is None
    stages = one.submission.pipeline
    assert stages.stage("a").resources == Resources(gpu="H100-80GB", gpus_per_node=8, nodes=2)
    assert stages.stage("c").resources == Resources(workers_per_node=2, nodes=2)


@pytest.mark.parametrize(("backend", "options"), [("nowhere", {}), ("elsewhere", {"odd": "1"})])
def test_a_backend_or_an_option_that_is_none_is_an_error_not_an_answer(elsewhere, backend, options):
    wrong = RunPlace.model_validate({"name": "x", "backend": backend, "options": options})
    with pytest.raises(SubmitError) as refused:
        ask([wrong, place()], submission())
    assert refused.value.kind == "input"
    assert "place 'x'" in str(refused.value)


MAYBE = st.none() | st.integers(0, 4).map(float)


def answer(name: str, waits: float | None, takes: float | None, usd: float | None) -> Answer:
    return Answer(place(name=name), lasting=Lasting(takes, usd), availability=Availability(waits, ""))


@given(
    st.lists(st.tuples(MAYBE, MAYBE, MAYBE), min_size=1, max_size=5), st.sampled_from(["first", "cheapest"])
)
def test_none_is_done_earlier_or_cheaper_than_the_one_that_is_chosen(rows, goal):
    answers = [answer(f"p{number}", *row) for number, row in enumerate(rows)]
    best, why = choose(answers, goal)
    key = (lambda one: one.done_seconds) if goal == "first" else (lambda one: one.lasting.usd)
    known = [key(one) for one in answers if key(one) is not None]
    assert key(best) == (min(known) if known else None)
    assert why
    same = [row for row in rows if row == rows[answers.index(best)]]
    assert answers.index(best) == rows.index(same[0]), "of equals the first"


def test_the_reason_names_the_runner_up_and_what_is_not_known():
    answers = [answer("a", 60.0, 3600.0, 9.0), answer("b", 0.0, 7200.0, 4.0), answer("c", None, 60.0, None)]
    assert choose(answers, "first")[1] == "done first, in 1h01m; b in 2h00m; of 1 other nobody knows"
    assert (
        choose(answers, "cheapest")[1]
        == "the cheapest, for 4.00 USD; a for 9.00 USD; of 1 other nobody knows"
    )
    assert choose(answers[2:], "first") == (answers[2], "the only place that can run it")
    assert choose([answers[2], answer("d", None, 30.0, None)], "first")[1] == (
        "nobody knows of any place when its trainings would be done; its trainings take the least time"
    )
    assert choose([Answer(place(), "away")], "first") == (None, "no place can run it")


def test_a_file_of_places_is_refused_with_its_line(tmp_path):
    path = tmp_path / "places.yaml"
    for text, line, words in (
        ("version: 1\nplaces:\n  - {name: x, backend: local, token: abc}\n", 3, "unknown key 'token'"),
        ("version: 1\ngoal: cheep\nplaces: [{name: x, backend: local}]\n", 2, "unknown value 'cheep'"),
        ("version: 2\nplaces: [{name: x, backend: local}]\n", 1, "2"),
        ("version: 1\nplaces: []\n", 2, "the list is too short"),
        (
            "version: 1\nplaces: [{name: x, backend: a}, {name: x, backend: b}]\n",
            None,
            "two places are called 'x'",
        ),
    ):
        path.write_text(text)
        with pytest.raises(SpecErrors) as refused:
            read_places(path)
        (problem,) = refused.value.problems
        assert words in problem.message
        assert line is None or problem.line == line


# Kubernetes

GPU = "nvidia.com/gpu"


def node(name: str, gpus: int, **spec: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}},
        "spec": spec,
        "status": {
            "allocatable": {
                GPU: str(gpus),
                "cpu": "64",
                "memory": "1Ti",
                "ephemeral-storage": "1Ti",
                "pods": "110",
            },
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def pod(name: str, on: str, gpus: int, phase: str = "Running") -> dict[str, Any]:
    limits = {GPU: str(gpus), "cpu": "500m"}
    spec = {"nodeName": on, "containers": [{"resources": {"limits": limits, "requests": {"cpu": "250m"}}}]}
    return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}


def cluster(queue: str | None = None) -> tuple[KubernetesBackend, Submission]:
    asked = submission(gpus_per_node=8, gpu="A100-80GB", nodes=2)
    overrides = (f"kubernetes.queue={queue}",) if queue else ()
    pipeline = load_pipeline_text(asked.text, "p.yaml", overrides=overrides)
    return KubernetesBackend.of_submission(pipeline, {}), replace(asked, pipeline=pipeline)


def test_nodes_have_room_when_their_pods_leave_it(server, api):
    backend, asked = cluster()
    for name in ("n1", "n2"):
        server.put("nodes", node(name, 8))
    server.put("pods", pod("ended", "n2", 8, "Succeeded"))
    assert backend.availability(asked) == Availability(0.0, "its nodes have room")
    server.put("pods", pod("other", "n2", 1))
    there = backend.availability(asked)
    assert (there.wait_seconds, there.words) == (None, "1 of 2 pods have room on its nodes now")
    server.drop("pods", "other")
    for changed in (
        node("n2", 8, unschedulable=True),
        node("n2", 8, taints=[{"key": "team", "value": "b", "effect": "NoSchedule"}]),
        {**node("n2", 8), "metadata": {"name": "n2", "labels": {}}},
        node("n2", 7),
    ):
        server.put("nodes", changed)
        assert (
            backend.availability(asked).words
            == "1 of 2 pods have room on its nodes now, 1 if they were empty"
        )
    server.put("nodes", node("n2", 8, taints=[{"key": GPU, "effect": "NoSchedule"}]))
    assert backend.availability(asked).wait_seconds == 0.0
    server.denied.add("list nodes")
    assert backend.availability(asked) == Availability(None, "you may not list its nodes and their pods")


def queues(server: Any, *, quota: int, used: int, pending: int = 0, controller: str = "other") -> None:
    server.put("localqueues", {"metadata": {"name": "team-a"}, "spec": {"clusterQueue": "all"}})
    flavor = {"name": "a100", "resources": [{"name": GPU, "nominalQuota": quota}]}
    spec = {"resourceGroups": [{"coveredResources": [GPU], "flavors": [flavor]}]}
    spec |= {"admissionChecksStrategy": {"admissionChecks": [{"name": "check"}]}}
    taken = {"name": "a100", "resources": [{"name": GPU, "total": str(used)}]}
    status = {"pendingWorkloads": pending, "flavorsReservation": [taken]}
    server.put("clusterqueues", {"metadata": {"name": "all"}, "spec": spec, "status": status})
    check = {"metadata": {"name": "check"}, "spec": {"controllerName": f"kueue.x-k8s.io/{controller}"}}
    check["spec"]["parameters"] = {"kind": "MultiKueueConfig", "name": "workers"}
    server.put("admissionchecks", check)
    workers = {"metadata": {"name": "workers"}, "spec": {"clusters": ["east", "west"]}}
    server.put("multikueueconfigs", workers)


def test_a_queue_is_asked_for_its_quota_and_who_waits_in_it(server, api):
    backend, asked = cluster("team-a")
    queues(server, quota=20, used=4)
    assert backend.availability(asked) == Availability(0.0, "queue team-a has the quota free")
    queues(server, quota=20, used=5)
    assert backend.availability(asked) == Availability(
        None, f"queue team-a has too little quota free: {GPU} 15 of 16"
    )
    queues(server, quota=20, used=4, pending=3)
    assert backend.availability(asked) == Availability(None, "queue team-a: 3 before it")
    queues(server, quota=20, used=4, controller="multikueue")
    assert backend.availability(asked) == Availability(
        None, "queue team-a: MultiKueue chooses among east, west, and when"
    )
    server.denied.add("get clusterqueues")
    there = backend.availability(asked)
    assert there.wait_seconds is None
    assert "you may not read" in there.words


def test_a_cluster_that_is_away_is_told_as_such(server, api):
    backend, asked = cluster()
    server.inject("GET", "/nodes", Fault("reset"), times=1000)
    with pytest.raises(SubmitError, match="cannot be reached"):
        backend.availability(asked)


# Slurm


def test_slurm_is_asked_when_the_last_of_its_jobs_would_start(tmp_path, monkeypatch):
    """A stand-in of sbatch, which says what the one of 22.05.8 says."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{Path('/usr/bin')}:/bin")
    now = int(time.time())
    sbatch = tmp_path / "sbatch"

    def says(*starts: int) -> None:
        lines = [
            f"sbatch: Job {7 + n} to start at {datetime.fromtimestamp(at).isoformat()} using 8 processors "
            "on nodes n1 in partition debug"
            for n, at in enumerate(starts)
        ]
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in lines))
        sbatch.write_text(
            f"#!/bin/sh\ncd {tmp_path}; cat >/dev/null\n"
            "head -n1 lines >&2; sed -i 1d lines; echo $* >>calls\n"
        )
        sbatch.chmod(sbatch.stat().st_mode | stat.S_IXUSR)

    asked = submission()
    asked = replace(asked, folder=str(tmp_path))
    monkeypatch.setattr(time, "time", lambda: now)
    says(now + 5, now + 600)
    assert SlurmBackend({}).availability(asked) == Availability(600.0, "by Slurm's own estimate")
    assert (tmp_path / "calls").read_text().split("\n")[0] == "--parsable --test-only"
    says(now - 5, now - 5)
    assert SlurmBackend({}).availability(asked).wait_seconds == 0.0
    says(now)
    assert SlurmBackend({}).availability(asked) == Availability(
        None, "Slurm does not say when its jobs would start"
    )


# The command


@pytest.fixture
def mine(tmp_path, monkeypatch, elsewhere) -> Any:
    """A pipeline of one command, two places, and the command line in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("MLPIPE_CACHE", str(tmp_path / "cache"))
    body = {"version": 1, "name": "p", "store": "store", "stages": [{"name": "a", "command": ["true"]}]}
    (tmp_path / "p.yaml").write_text(json.dumps(body))
    listed = [
        {"name": "far", "backend": "elsewhere", "options": {"does": "waits 60"}},
        {"name": "gone", "backend": "elsewhere", "options": {"does": "away"}},
        {"name": "here", "backend": "local", "overrides": ["a.timeout=9 min"]},
    ]
    (tmp_path / "config" / "mlpipe").mkdir(parents=True)
    (tmp_path / "config" / "mlpipe" / "places.yaml").write_text(json.dumps({"version": 1, "places": listed}))
    started = []
    monkeypatch.setattr("mlpipe.submit.detach.detach", lambda store, run_id, only: started.append(run_id))

    def call(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["submit", "p.yaml", "--to", "auto", *arguments], obj=CliSession())

    return call, started


def test_a_dry_run_shows_every_place_and_starts_nothing(mine, tmp_path):
    call, started = mine
    done = call("--dry-run", "--output", "json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert (document["chosen"], document["goal"]) == ("here", "first")
    assert [one["cannot"] for one in document["places"]] == [None, "x: it does not answer", None]
    assert [one["wait_seconds"] for one in document["places"]] == [60.0, None, 0.0]
    text = call("--dry-run").stdout
    assert [line.split()[:5] for line in text.splitlines()] == [
        ["place", "backend", "waits", "trains", "USD"],
        ["far", "elsewhere", "1m00s", "-", "?"],
        ["gone", "elsewhere", "-", "-", "-"],
        ["here", "local", "now", "-", "?"],
        ["here:", "done", "first,", "at", "once;"],
    ], text
    assert (started, (tmp_path / "store").exists()) == ([], False)


def test_a_run_that_is_there_goes_on_where_it_is_whatever_the_places_say(mine, tmp_path):
    from mlpipe.store.folder import FolderStore
    from mlpipe.store.runs import read_run

    call, started = mine
    first = call("--run-id", "r")
    assert (first.exit_code, started) == (0, ["r"]), first.output
    run = read_run(FolderStore(tmp_path / "store"), "r")
    assert (run.backend, run.meta["set"]) == ("local", ["a.timeout=9 min"])
    (tmp_path / "config" / "mlpipe" / "places.yaml").write_text("broken")
    again = call("--run-id", "r")
    assert again.exit_code == 0, again.output
    assert "run r is there, at local" in again.stderr
    assert read_run(FolderStore(tmp_path / "store"), "r") == run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--places", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["--context", "prod"], "--context is for --to kubernetes"),
        (["--phase", "train", "--run-id", "r", "--wait"], "--phase is not for --to auto"),
    ],
)
def test_what_does_not_go_with_it_is_refused(mine, arguments, words):
    call, started = mine
    done = call(*arguments)
    assert started == []
    assert words in done.output + str(done.exception)


def test_where_no_place_can_run_it_all_say_why(mine, tmp_path):
    call, started = mine
    listed = [{"name": "gone", "backend": "elsewhere", "options": {"does": "away"}}]
    (tmp_path / "few.yaml").write_text(json.dumps({"version": 1, "places": listed}))
    for dry in ((), ("--dry-run",)):
        done = call("--places", "few.yaml", *dry)
        assert (done.exception.kind, started) == ("input", [])
        assert (done.exception.message, done.exception.hint) == (
            "no place can run it",
            "gone: x: it does not answer",
        )


def test_without_a_file_of_places_it_says_where_it_belongs(mine, tmp_path):
    call, _ = mine
    (tmp_path / "config" / "mlpipe" / "places.yaml").unlink()
    done = call()
    assert done.exception.where == str(tmp_path / "config" / "mlpipe" / "places.yaml")
    assert asking.DEADLINE_SECONDS == 30.0, "as docs/how-to/places.md says"
