"""`mlpipe submit --to kubernetes` against a stand-in API server: what is made, once, and what refuses how.

The store is a folder that the pipeline file calls a volume; pods there are none, so no run goes on.
"""

from __future__ import annotations

import json
import signal
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kit import budget
from kit.apiserver import TOKEN, ApiServer, Fault
from kit.command_runs import Cli, until

from mlpipe._core import environment
from mlpipe._core.errors import StoreError, SubmitError
from mlpipe.cli.app import run_app
from mlpipe.store import leases, runs
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import StageState
from mlpipe.submit import driver
from mlpipe.submit.driver import drive
from mlpipe.submit.executor import StopRequest
from mlpipe.submit.kubernetes import api as cluster_api
from mlpipe.submit.kubernetes import driver_job
from mlpipe.submit.kubernetes.api import ClusterApi

pytestmark = pytest.mark.unit
IMAGE = "registry.example.com/team/mlpipe@sha256:" + "0" * 64


class Person:
    """Somebody with a pipeline file, a kubeconfig and a store, and the command line in this process."""

    def __init__(self, folder: Path, server: ApiServer, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self.server, self._capfd = folder, server, capfd
        self.store = FolderStore(folder / "store")
        self.said = ""
        self.spec = self.write()

    def write(self, **kubernetes: object) -> Path:
        body = {
            "version": 1,
            "name": "test",
            "image": IMAGE,
            "kubernetes": {"volumes": [{"claim": "data", "path": str(self.folder / "store")}], **kubernetes},
            "stages": [{"name": "a", "command": ["true"]}],
        }
        path = self.folder / "pipeline.yaml"
        path.write_text(json.dumps(body))
        return path

    def mlpipe(self, *arguments: str) -> tuple[int, str]:
        """Exit code, and all that it printed."""
        with pytest.raises(SystemExit) as ended:
            run_app([*arguments, "--store", str(self.folder / "store")])
        return int(ended.value.code), self.hear()

    def hear(self) -> str:
        """What was printed since the last time."""
        text = "".join(self._capfd.readouterr())
        self.said += text
        return text

    def submit(self, *arguments: str) -> tuple[int, str]:
        return self.mlpipe("submit", str(self.spec), "--to", "kubernetes", *arguments)

    def made(self) -> list[tuple[str, str]]:
        return sorted(key for key in self.server.objects if key[0] != "namespaces")

    def posts(self, word: str = "") -> int:
        return sum(request.startswith("POST") and word in request for request in self.server.requests)


@pytest.fixture
def server():
    with ApiServer() as one:
        yield one


@pytest.fixture
def folder():
    """Outside of /tmp, which is the pod's own and so no place for a volume."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def person(server, folder, monkeypatch, capfd, clock) -> Person:
    monkeypatch.setattr(cluster_api, "DEADLINE_SECONDS", 0.3)
    monkeypatch.setattr(cluster_api, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(cluster_api, "_GONE_SECONDS", 0.3)
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(folder)))
    monkeypatch.setenv("MLPIPE_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)
    return Person(folder, server, capfd)


def refuse(method: str, status: int, message: str):
    return lambda person: person.server.inject(method, "/jobs", Fault("status", status, message), times=1000)


REFUSALS = {
    "unknown context": (lambda person: None, ["--context", "prod"], 2, "no context 'prod'"),
    "no rights": (lambda person: person.server.denied.add("create jobs"), [], 2, "you may not create Job"),
    "expired token": (lambda person: setattr(person.server, "token", "new"), [], 2, "does not know you"),
    "no namespace": (
        lambda person: person.write(namespace="none"),
        [],
        2,
        "kubectl create namespace none",
    ),
    "a queue without Kueue": (
        lambda person: (person.write(queue="team-a"), person.server.missing.add("workloads")),
        [],
        2,
        "kubernetes.queue is team-a, and this cluster has no Kueue",
    ),
    "invalid": (refuse("POST", 422, "spec.template: Invalid value"), [], 2, "spec.template: Invalid value"),
    "too many requests": (refuse("POST", 429, "slow down"), [], 4, "slow down"),
    "internal error": (refuse("POST", 500, "etcd is sad"), [], 4, "etcd is sad"),
    "no room": (
        refuse("POST", 403, "exceeded quota: mlpipe, requested: count/jobs=1"),
        [],
        4,
        "no room to create",
    ),
    "half a body": (
        lambda person: person.server.inject("POST", "/jobs", Fault("cut"), times=1000),
        [],
        4,
        "cannot be reached",
    ),
    "a proxy's page": (
        lambda person: person.server.inject("POST", "/jobs", Fault("page", 503), times=1000),
        [],
        4,
        "an answer that is no JSON",
    ),
    "away": (lambda person: person.server.away(), [], 4, "cannot be reached"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_sentence_and_an_exit_code(person, case):
    prepare, arguments, code, words = REFUSALS[case]
    prepare(person)
    got, text = person.submit("--run-id", "r", *arguments)
    assert (got, words in text) == (code, True), text
    errors = [line for line in text.splitlines() if "error:" in line]
    assert len(errors) == 1
    assert "Traceback" not in text
    assert person.made() == []
    assert not any("/pods" in request for request in person.server.requests)
    assert not list((person.folder / "store").glob("runs/*"))  # nor a run in the store


def test_a_stage_whose_pods_are_refused_is_named_before_anything_runs(person):
    """Whatever stage: here the only one; the driver's pod comes first."""
    said = 'pods "r-a-1-0" is forbidden: violates PodSecurity "restricted:latest": privileged'
    person.server.inject("POST", "/pods", Fault("pass"))
    person.server.inject("POST", "/pods", Fault("status", 403, said))
    code, text = person.submit("--run-id", "r")
    assert (code, "stage 'a'" in text, "violates PodSecurity" in text) == (2, True, True)
    assert "look at kubernetes.patches" in text
    assert (person.made(), list((person.folder / "store").glob("runs/*"))) == ([], [])
    # what there is no room for waits, and who may not make pods is told by the driver
    person.server.inject("POST", "/configmaps", Fault("status", 403, "exceeded quota: count/configmaps=1"))
    person.server.denied.add("create pods")
    assert person.submit("--run-id", "r")[0] == 0


def test_once_the_cause_is_gone_the_same_command_works(person):
    person.server.denied.add("create jobs")
    assert person.submit("--run-id", "r")[0] == 2
    person.server.denied.clear()
    code, text = person.submit("--run-id", "r")
    assert (code, text.splitlines()[0]) == (0, "r")
    assert person.made() == [("jobs", "r-driver")]


def test_the_real_command_line_says_the_same(person):
    cli = Cli(person.folder)
    done = cli("submit", "pipeline.yaml", "--to", "kubernetes", "--context", "prod", code=2)
    assert "the kubeconfig has no context 'prod'" in done.stderr
    assert not list((person.folder / "store").glob("runs/*"))
    person.server.denied.add("create jobs")
    done = cli("submit", "pipeline.yaml", "--to", "kubernetes", "--run-id", "r", code=2)
    assert "you may not create Job r-driver in namespace ml (403)" in done.stderr
    person.server.denied.clear()
    cli("submit", "pipeline.yaml", "--to", "kubernetes", "--run-id", "r")
    assert person.made() == [("jobs", "r-driver")]


@pytest.mark.parametrize("how", ["lose", "cut", "reset"])
def test_a_lost_answer_makes_one_driver(person, how):
    person.server.inject("POST", "/jobs", Fault(how))
    assert person.submit("--run-id", "r")[0] == 0
    assert person.made() == [("jobs", "r-driver")]


def test_the_same_run_again_is_adopted_and_another_pipeline_is_refused(person):
    assert person.submit("--run-id", "r")[0] == 0
    uid = person.server.objects["jobs", "r-driver"]["metadata"]["uid"]
    assert person.submit("--run-id", "r")[0] == 0
    assert person.server.objects["jobs", "r-driver"]["metadata"]["uid"] == uid
    code, text = person.submit("--run-id", "r", "--set", "stages.a.command=[false]")
    assert (code, "was started with another pipeline" in text) == (2, True)
    # the store knows no such run, but the cluster does: of another pipeline, from another store
    person.server.objects["jobs", "s-driver"] = json.loads(
        json.dumps(person.server.objects["jobs", "r-driver"]).replace("r-driver", "s-driver")
    )
    code, text = person.submit("--run-id", "s")
    assert (code, "exists and was made from another spec" in text) == (2, True)


def test_two_people_at_once_start_one_driver(person):
    """Each in a process of its own."""
    cli = Cli(person.folder)
    arguments = ("submit", "pipeline.yaml", "--to", "kubernetes", "--run-id", "r")
    both = [cli.start(*arguments) for _ in range(2)]
    ended = [(process.communicate(timeout=300), process.returncode) for process in both]
    assert person.made() == [("jobs", "r-driver")], ended
    assert 0 in [code for _, code in ended]


def test_a_driver_that_ended_makes_room_for_a_new_one(person):
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    assert person.submit("--run-id", "r")[0] == 0
    assert person.server.objects["jobs", "r-driver"]["metadata"]["uid"] != job["metadata"]["uid"]


def test_of_two_who_resume_a_failed_run_the_second_adopts(person, monkeypatch):
    """Both saw that its driver has ended; between two calls of the first, the second does all."""
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    runs.update_run(person.store, "r", lambda run: replace(run, state="failed"))
    made = []

    def start_driver(*arguments, **keywords):
        if not made:
            made.append(None)
            second = ClusterApi.delete

            def delete(api, kind, name, **options):
                """The first has read which Job has ended, and is about to delete it."""
                monkeypatch.setattr(ClusterApi, "delete", second)
                start(*arguments, **keywords)
                made[0] = person.server.objects["jobs", "r-driver"]["metadata"]["uid"]
                second(api, kind, name, **options)

            monkeypatch.setattr(ClusterApi, "delete", delete)
        return start(*arguments, **keywords)

    start = driver_job.start_driver
    monkeypatch.setattr(driver_job, "start_driver", start_driver)
    assert person.submit("--run-id", "r")[0] == 0
    assert made[0] is not None
    assert person.server.objects["jobs", "r-driver"]["metadata"]["uid"] == made[0]


def test_a_resume_that_was_overtaken_opens_nothing_again(person):
    """Its stage runs by then: to wait again would make another attempt of it."""
    person.submit("--run-id", "r")
    failed = runs.update_run(person.store, "r", lambda run: replace(run, state="failed"))
    runs.reopen(person.store, "r", seen=failed)
    runs.request_cancel(person.store, "r", "not this one")
    runs.update_run(
        person.store, "r", lambda run: replace(run, stages={"a": StageState("running", attempt=1)})
    )
    with pytest.raises(StoreError, match="was resumed meanwhile"):
        runs.reopen(person.store, "r", seen=failed)
    assert runs.read_run(person.store, "r").stages["a"].state == "running"
    assert runs.cancel_requested(person.store, "r") == "not this one"


def test_changes_of_a_done_run_are_taken_up_or_refused(person, monkeypatch):
    """Nobody drives here, so whoever follows sees only that the run was opened again and got a driver."""
    body = json.loads(person.spec.read_text())
    data = {"entry": "my.data:make", "batch_size": 8}
    train = {"model": {"preset": "llama-1m", "seq_len": 32}, "data": data, "steps": 9}
    gate = {"name": "b", "needs": ["a"], "evaluate": {"gate": "val_loss < 3"}}
    person.spec.write_text(json.dumps({**body, "stages": [{"name": "a", "train": train}, gate]}))
    assert person.submit("--run-id", "r")[0] == 0
    job = person.server.objects["jobs", "r-driver"]
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    done = {"a": StageState("done", attempt=1), "b": StageState("done", attempt=1)}
    runs.update_run(person.store, "r", lambda run: replace(run, state="done", stages=done))
    for change, says in (("a.strategy=ddp", "changes nothing of it"), ("x.y=1", "no stage 'x'")):
        code, said = person.mlpipe("resume", "r", "--set", change)
        assert (code, runs.read_run(person.store, "r").state) == (2, "done")
        assert says in said
    monkeypatch.setattr("mlpipe.cli.wait.wait_for", lambda *_: 0)
    assert person.mlpipe("resume", "r", "--set", "b.gate=val_loss < 4")[0] == 0
    run = runs.read_run(person.store, "r")
    assert (run.state, run.meta["set"]) == ("running", ["b.gate=val_loss < 4"])
    assert (run.stages["a"].state, run.stages["b"].state) == ("done", "pending")
    assert person.server.objects["jobs", "r-driver"]["metadata"]["uid"] != job["metadata"]["uid"]
    runs.update_run(
        person.store, "r", lambda run: replace(run, stages={**done, "b": StageState("running", 2)})
    )
    code, said = person.mlpipe("resume", "r", "--set", "b.gate=val_loss < 5")
    assert code == 2
    assert "is under way, and what it was asked for does not change meanwhile" in said


def test_a_resume_that_the_cluster_would_refuse_changes_nothing(person):
    """It is asked first, as at a submit."""
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    failed = runs.update_run(person.store, "r", lambda run: replace(run, state="failed"))
    said = 'pods "r-a-1-0" is forbidden: violates PodSecurity "restricted:latest": privileged'
    person.server.inject("POST", "/pods", Fault("pass"))
    person.server.inject("POST", "/pods", Fault("status", 403, said))
    code, text = person.mlpipe("resume", "r")
    assert (code, "violates PodSecurity" in text) == (2, True), text
    assert runs.read_run(person.store, "r") == failed
    assert person.server.objects["jobs", "r-driver"] is job


def test_a_driver_that_finds_the_run_ended_by_another_adds_no_attempt(person, monkeypatch):
    person.submit("--run-id", "r")
    runs.update_run(person.store, "r", lambda run: replace(run, state="failed"))
    take = leases.take_lease

    def overtaken(*arguments, **keywords):
        monkeypatch.setattr(leases, "take_lease", take)
        runs.reopen(person.store, "r")
        runs.update_run(person.store, "r", lambda run: replace(run, state="failed", message="again"))
        return take(*arguments, **keywords)

    monkeypatch.setattr(leases, "take_lease", overtaken)
    assert drive(person.store, "r", stop=StopRequest()).message == "again"
    assert runs.read_run(person.store, "r").stages["a"].attempt == 0


def test_a_driver_that_is_about_to_end_is_not_taken_for_a_new_one(person, monkeypatch):
    """Its run was cancelled a moment ago, and its pod has yet to be seen as ended."""
    monkeypatch.setattr("mlpipe.submit.kubernetes.objects._POLL_SECONDS", 0.02)
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    runs.update_run(person.store, "r", lambda run: replace(run, state="cancelled"))

    def end() -> None:
        asked = len(person.server.requests)
        until(lambda: len(person.server.requests) > asked + 4, "looks at it")
        job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}

    played = threading.Thread(target=end)
    played.start()
    assert person.submit("--run-id", "r")[0] == 0
    played.join(300)
    assert person.server.objects["jobs", "r-driver"]["metadata"]["uid"] != job["metadata"]["uid"]


@pytest.mark.parametrize("where", ["client", "server"])
def test_a_dry_run_makes_nothing(person, where):
    code, text = person.submit(f"--dry-run={where}")
    assert (code, "kind: Job" in text) == (0, True)
    assert person.made() == []
    assert not list((person.folder / "store").glob("runs/*"))
    assert all("dryRun=All" in request for request in person.server.requests)
    assert bool(person.server.requests) == (where == "server")


def test_an_image_is_fetched_ahead_once_and_not_after_a_cancel(person):
    person.spec = person.write(prepull=True)
    body = json.loads(person.spec.read_text())
    body["stages"].append({"name": "b", "command": ["true"], "needs": ["a"]})
    person.spec.write_text(json.dumps(body))
    for _ in range(2):
        assert person.submit("--run-id", "r")[0] == 0
    jobs = [name for kind, name in person.made() if kind == "jobs"]
    assert len(jobs) == 2
    assert any("-b-pull-" in name for name in jobs)
    person.mlpipe("cancel", "r")
    assert not [name for kind, name in person.made() if kind == "jobs"]


def test_what_a_dry_run_prints_is_what_is_sent(person):
    """By the client and then by the driver, which is a thread here; but for what the server adds."""
    _, text = person.submit("--run-id", "r", "--dry-run", "--output", "json")
    printed, _ = json.JSONDecoder().raw_decode(text[text.index("[") :])
    person.submit("--run-id", "r")
    stop = StopRequest()

    def watch(_: runs.RunState) -> None:
        if len(person.made()) == len(printed):
            stop.request("detached", "all is sent")

    drive(person.store, "r", stop=stop, watch=watch)
    sent = [json.loads(json.dumps(person.server.objects[key])) for key in person.made()]
    for one in sent:
        del one["metadata"]["uid"]
        one["metadata"].pop("ownerReferences", None)
    by_name = {(one["kind"], one["metadata"]["name"]): one for one in printed}
    assert {(one["kind"], one["metadata"]["name"]): one for one in sent} == by_name
    assert sorted(kind for kind, _ in by_name) == ["ConfigMap", "Job", "Job"]


def test_a_driver_whose_pod_has_ended_is_not_waited_for(person, monkeypatch):
    """It was killed, and its lease would hold for a minute; without `has_ended` this waits until then."""
    person.submit("--run-id", "r")
    ended = [{"state": {"terminated": {"exitCode": 137}}}]
    pod = {"metadata": {"name": "p"}, "status": {"containerStatuses": ended}}
    uid = person.server.put("pods", pod)["metadata"]["uid"]
    lost = runs.Lease("dead", "p", 1, time.time() + 3000, "boot pid:[1]", 1, "p", uid)
    runs.update_run(person.store, "r", lambda run: replace(run, driver=lost))
    monkeypatch.setattr(driver, "TAKEOVER_SECONDS", 5.0)
    stop = StopRequest()
    stop.request("detached", "it has the lease")
    assert drive(person.store, "r", stop=stop).driver.holder != "dead"
    elsewhere = replace(lost, pod_uid="another")
    runs.update_run(person.store, "r", lambda run: replace(run, driver=elsewhere))
    monkeypatch.setattr(driver, "TAKEOVER_SECONDS", 0.0)
    with pytest.raises(SubmitError, match="is driven by process"):
        drive(person.store, "r", stop=stop)


def test_a_run_asks_the_api_server_for_little(person):
    """The driver is this process, and the stage's pod is played: it has ended well once there is its Job."""
    asked = {}

    def count(who: str) -> None:
        asked[who] = len(person.server.requests) - sum(asked.values())

    def play(_: runs.RunState) -> None:
        for (kind, name), job in list(person.server.objects.items()):
            if kind == "jobs" and name != "r-driver" and "status" not in job:
                outcome = {"outcome": "done", "kind": None, "message": "", "exit_code": 0, "time": 0.0}
                key = "runs/r/stages/a/attempt-1/outcome.json"
                person.store.put(key, json.dumps(outcome).encode())
                complete = {"conditions": [{"type": "Complete", "status": "True"}]}
                person.server.put("jobs", job | {"status": complete})

    assert person.submit("--run-id", "r")[0] == 0
    count("submit")
    drive(person.store, "r", stop=StopRequest(), watch=play)
    assert runs.read_run(person.store, "r").state == "done"
    count("driver of a stage")
    assert person.mlpipe("list")[0] == 0
    count("list")
    budget.within("API requests of a run", asked)


def test_waiting_says_why_and_ends_as_the_run_does(person, monkeypatch):
    """The driver is played: it takes the lease, and the run ends."""
    monkeypatch.setattr("mlpipe.cli.wait._LOOK_SECONDS", 0.1)
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "message": "0/1 nodes are available: 1 Insufficient cpu.",
    }

    def play() -> None:
        until(lambda: ("jobs", "r-driver") in person.server.objects, "the driver's Job")
        labels = person.server.objects["jobs", "r-driver"]["spec"]["template"]["metadata"]["labels"]
        status = {"phase": "Pending", "conditions": [condition]}
        person.server.put("pods", {"metadata": {"name": "p", "labels": labels}, "status": status})
        looks = lambda: sum("GET" in one and "/pods" in one for one in person.server.requests)  # noqa: E731
        until(lambda: looks() > 2, "looks at the pod")
        leases.take_lease(person.store, "r", "driver", 60.0)
        waits = StageState("running", attempt=1, message="pod a waits: exceeded quota")
        runs.update_run(person.store, "r", lambda run: replace(run, state="running", stages={"a": waits}))
        until(lambda: "exceeded quota" in person.hear(), "the word on the stage")
        runs.update_run(person.store, "r", lambda run: replace(run, state="cancelled"))
        leases.release_lease(person.store, "r", "driver")

    played = threading.Thread(target=play)
    played.start()
    code, _ = person.submit("--run-id", "r", "--wait")
    played.join(300)
    text = person.said
    assert "its driver does not run: pod p waits: 0/1 nodes are available: 1 Insufficient cpu" in text
    assert "a  running: pod a waits: exceeded quota" in text
    assert text.count("Insufficient cpu") == 1
    assert text.count("exceeded quota") == 1
    assert code == 5


def test_a_run_whose_driver_is_gone_says_so_with_the_remedy(person):
    person.submit("--run-id", "r")
    assert "nobody drives it" not in person.mlpipe("status", "r")[1]
    gone = runs.Lease("dead", "p", 1, time.time() - 1000.0)
    runs.update_run(person.store, "r", lambda run: replace(run, state="running", driver=gone))
    job = person.server.objects["jobs", "r-driver"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    ended = {"exitCode": 2, "message": "starting\nerror: pipeline.yaml:3: no such key\n"}
    status = {"phase": "Failed", "containerStatuses": [{"state": {"terminated": ended}}]}
    person.server.put("pods", {"metadata": {"name": "p", "labels": labels}, "status": status})
    words = "pod p ended with exit code 2: pipeline.yaml:3: no such key"
    assert f"its driver fails and is started again: {words}" in person.mlpipe("status", "r")[1]
    job["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
    said = f"nobody drives it: it ended for good: {words}; go on with mlpipe resume r"
    assert said in person.mlpipe("status", "r")[1]
    person.server.drop("pods", "p")
    person.server.drop("jobs", "r-driver")
    said = "nobody drives it: its Job is gone; go on with mlpipe resume r"
    assert said in person.mlpipe("status", "r")[1]
    assert "nobody drives it: mlpipe resume r" in person.mlpipe("list")[1]
    waits = {"message": runs.WAITS_FOR_STAGES}
    runs.update_run(person.store, "r", lambda run: replace(run, **waits))  # as between two builds' stages
    assert "nobody drives it" not in person.mlpipe("status", "r")[1] + person.mlpipe("list")[1]


def test_a_driver_that_no_other_could_better_ends_its_job(person, monkeypatch):
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    job["status"] = {"failed": 3}
    before = job["spec"]["backoffLimit"]
    path = person.folder / "store/runs/r/pipeline.yaml"
    text = path.read_text()
    path.write_text(text.replace("stages", "stagecoaches"))
    assert person.mlpipe("resume", "r", "--here")[0] == 2
    assert job["spec"]["backoffLimit"] == before  # of somebody else than the driver
    monkeypatch.setenv(environment.POD_UID, "u")
    path.write_text(text)
    monkeypatch.setattr(driver, "TAKEOVER_SECONDS", 0.0)
    leases.take_lease(person.store, "r", "another", 60)
    assert person.mlpipe("resume", "r", "--here")[0] == 4
    assert job["spec"]["backoffLimit"] == before  # the other may die
    leases.release_lease(person.store, "r", "another")
    path.write_text(text.replace("stages", "stagecoaches"))
    assert person.mlpipe("resume", "r", "--here")[0] == 2
    assert job["spec"]["backoffLimit"] == 3


def test_an_api_server_that_goes_away_while_waiting(person, monkeypatch):
    """Told with exit code 4; the run goes on without its client."""
    monkeypatch.setattr("mlpipe.cli.wait._LOOK_SECONDS", 0.1)

    def leave() -> None:
        # not only its dry run: the driver is there, and the client looks at it
        until(lambda: person.made() and person.server.requests[-1].startswith("GET"), "a look")
        person.server.away()

    watcher = threading.Thread(target=leave)
    watcher.start()
    code, text = person.submit("--run-id", "r", "--wait")
    watcher.join(300)
    assert (code, "cannot be reached" in text) == (4, True)
    assert person.made() == [("jobs", "r-driver")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_client_that_waits_detaches(person, number):
    cli = Cli(person.folder)
    waiting = cli.start("submit", "pipeline.yaml", "--to", "kubernetes", "--run-id", "r", "--wait")
    until(lambda: any("GET" in one and "/pods" in one for one in person.server.requests), "to follow")
    waiting.send_signal(number)
    _, err = waiting.communicate(timeout=300)
    assert waiting.returncode == 130
    assert "detached; run r goes on" in err
    assert person.made() == [("jobs", "r-driver")]


def test_later_commands_go_to_the_cluster_of_the_submit(person):
    """Though the kubeconfig has another current context by then."""
    person.submit("--run-id", "r")
    path = person.folder / "kubeconfig"
    body = json.loads(path.read_text())
    body["contexts"].append({"name": "other", "context": {"cluster": "none", "user": "u"}})
    body["clusters"].append({"name": "none", "cluster": {"server": "http://127.0.0.1:9"}})
    path.write_text(json.dumps({**body, "current-context": "other"}))
    assert person.mlpipe("cancel", "r")[0] == 0
    assert person.made() == []


def test_a_run_of_the_same_id_in_another_store_is_left_alone(person):
    """Two teams share a namespace: `cancel` of one's run deleted the other's pods."""
    person.submit("--run-id", "r")
    job = person.server.objects["jobs", "r-driver"]
    args = job["spec"]["template"]["spec"]["containers"][0]["args"]
    args[args.index("--store") + 1] = "s3://theirs/runs"
    made = person.made()
    assert person.mlpipe("cancel", "r")[0] == 0
    assert runs.read_run(person.store, "r").state == "cancelled"
    assert person.made() == made


def test_a_folder_that_was_given_in_another_spelling_is_the_same_store(person):
    """`cancel` left the pods where they were, and said that all had ended."""
    person.submit("--run-id", "r")
    args = person.server.objects["jobs", "r-driver"]["spec"]["template"]["spec"]["containers"][0]["args"]
    store = Path(args[args.index("--store") + 1])
    (link := person.folder / "link").symlink_to(store.parent)
    args[args.index("--store") + 1] = f"{link}/x/../{store.name}"
    (store.parent / "x").mkdir()
    assert person.mlpipe("cancel", "r")[0] == 0
    assert person.made() == []


def test_cancel_of_a_run_without_a_driver_leaves_nothing(person):
    person.submit("--run-id", "r")
    code, text = person.mlpipe("cancel", "r")
    assert (code, "cancelled" in text) == (0, True)
    assert person.made() == []
    assert runs.read_run(person.store, "r").state == "cancelled"


def test_nothing_that_is_printed_or_stored_holds_the_token(person):
    person.submit("--run-id", "r", "--debug")
    person.server.inject("GET", "/jobs", Fault("page", 403))
    person.mlpipe("cancel", "r", "--debug")
    person.server.token = "another"
    person.submit("--run-id", "s", "--debug")
    person.submit("--run-id", "t", "--context", "none", "--debug")
    person.mlpipe("status", "s", "--output", "json")
    assert TOKEN not in person.said
    assert TOKEN not in json.dumps([*person.server.objects.values()])
    for path in [*person.folder.glob("store/**/*"), *person.folder.glob("cache/**/*")]:
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes()
    assert any(f"Bearer {TOKEN}" in headers.values() for headers in person.server.headers)
