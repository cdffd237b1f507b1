"""Jobs of an elastic training's replicas on Slurm, submitted, stopped and judged; against a stand-in of its
commands."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from kit.command_runs import until
from kit.rendered import QUICKSTART, pipeline_of, plan_of

from mlpipe._core.errors import SubmitError
from mlpipe.render.slurm import comment, parts_of
from mlpipe.store import replicas
from mlpipe.store.folder import FolderStore
from mlpipe.store.outcome import AttemptOutcome, write_outcome
from mlpipe.store.preflight import write_slow
from mlpipe.submit import handle
from mlpipe.submit.slurm import client
from mlpipe.submit.slurm import replicas as replica_jobs
from mlpipe.submit.slurm.executor import SlurmExecutor
from mlpipe.submit.slurm.scripts import of_plan

pytestmark = pytest.mark.unit


class Stand:
    """In Slurm's place: jobs run at once, and end when they are told to, or by `becomes`."""

    def __init__(self, monkeypatch):
        self.lock, self.all, self.told = threading.RLock(), {}, []
        self.avoided = {}
        self.refuses = lambda part: False
        self.saves = lambda part: None
        for name in ("jobs", "submit", "signal", "cancel", "kill", "start_now"):
            monkeypatch.setattr(client, name, getattr(self, name))

    def jobs(self, prefix):
        with self.lock:
            return [job for job in self.all.values() if job.name.startswith(prefix)]

    def submit(self, script, folder, *, avoid=(), test_only=False):
        name = script.split("--job-name=", 1)[1].split("\n", 1)[0]
        with self.lock:
            if self.refuses(name.rpartition("/")[2]):
                raise SubmitError("sbatch: no such partition", kind="input")
            number = len(self.all) + 1
            if avoid:
                self.avoided[number] = tuple(avoid)
            self.all[number] = client.Job(number, "RUNNING", "None", 0, 0, "n1", name, comment(script))
            return number

    def signal(self, number, name):
        self.told.append((name, self.part(number)))
        self.saves(self.part(number))
        self.becomes(number, "FAILED")  # with the code of what was saved

    def cancel(self, number):
        self.told.append(("cancel", self.part(number)))
        self.becomes(number, "CANCELLED")

    kill = cancel

    def start_now(self, number):
        self.told.append(("start", self.part(number)))
        self.becomes(number, "RUNNING")

    def part(self, number):
        return self.all[number].name.rpartition("/")[2]

    def becomes(self, number, state, **fields):
        with self.lock:
            self.all[number] = replace(self.all[number], state=state, **fields)

    def alive(self):
        with self.lock:
            return sorted(self.part(job.id) for job in self.all.values() if not job.has_ended)


class Training:
    """Of 2 to 4 replicas."""

    def __init__(self, folder, slurm):
        self.slurm, self.store, self.folder = slurm, FolderStore(folder / "store"), folder
        self.spec = pipeline_of("quickstart", *QUICKSTART, "train.resources.nodes=2..4", "slurm.time=8 h")
        self.plan = plan_of(self.spec, "train")
        slurm.saves = lambda part: part == "coordinator" or self.leaves(part, outcome="saved", step=int(part))
        self.follow()

    def follow(self):
        executor = SlurmExecutor(self.store, str(self.folder), lambda *of: of_plan(self.spec, *of))
        executor.check(self.plan)
        self.handle = executor.start(self.plan, self.folder)

    def driver_dies(self):
        """Between two looks: what it has started goes on. Merely left, it would go on as well, and submit to
        the stand-in of the next test."""

        def gone(seconds):
            raise RuntimeError("killed")

        self.handle.wait = gone
        self.handle._thread.join(60)
        assert not self.handle._thread.is_alive()

    def until(self, *parts):
        until(lambda: self.slurm.alive() == sorted(parts), str(parts))

    def number(self, part):
        return max(job.id for job in self.slurm.all.values() if self.slurm.part(job.id) == part)

    def ends(self, part, state, **outcome):
        if outcome:
            self.leaves(part, **outcome)
        self.slurm.becomes(self.number(part), state)

    def leaves(self, part, **outcome):
        key = f"{self.plan.attempt_key}/outcome-replica-{part}.json"
        write_outcome(self.store, key, AttemptOutcome(**{"time": 1.0, **outcome}))

    def end(self):
        until(lambda: self.handle.poll() is not None, "the end", 60)
        return self.handle.poll()


@pytest.fixture
def training(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_jobs, "FIRST_POLL_SECONDS", 0.01)
    monkeypatch.setattr(replica_jobs, "LAST_POLL_SECONDS", 0.02)
    monkeypatch.setattr(handle, "_LOOK_SECONDS", 0.005)
    one = Training(tmp_path, Stand(monkeypatch))
    one.until("coordinator", "0", "1", "2", "3")
    yield one
    one.handle.terminate()
    until(lambda: one.handle.poll() is not None, "its end", 30)


def test_each_part_has_a_job_of_its_own_and_as_many_as_are_wanted(training):
    assert parts_of(training.plan) == ["coordinator", "0", "1", "2", "3"]
    replicas.want(training.store, training.plan.attempt_key, 2)
    training.until("coordinator", "0", "1")
    assert sorted(training.slurm.told) == [("USR2", "2"), ("USR2", "3")], "told to save, not killed"
    training.driver_dies()
    training.follow()  # another driver takes over, and submits none that are not wanted
    replicas.want(training.store, training.plan.attempt_key, 3)
    training.until("coordinator", "0", "1", "2")


def test_one_that_hinders_the_others_leaves_and_is_submitted_for_another_node(training):
    for number in range(4):
        training.slurm.becomes(training.number(str(number)), "RUNNING", nodes=f"n{number}")
    for number in range(4):
        told = b'{"n2": 1.5}' if number == 2 else b"{}"
        write_slow(training.store, training.plan.attempt_key, told, number)
    until(lambda: len(training.slurm.all) == 6, "another job")
    assert training.slurm.told == [("USR2", "2")], "told to save, and no other"
    assert training.slurm.avoided == {training.number("2"): ("n2",)}
    training.until("coordinator", "0", "1", "2", "3")
    said = "no replica shall run on n2: the others were faster without"
    until(lambda: training.handle.note() == said, "the note")


def test_what_slurm_queued_again_is_left_to_it_and_started(training):
    number = training.number("1")
    training.slurm.becomes(number, "PENDING", reason="BeginTime", restarts=1)
    until(lambda: ("start", "1") in training.slurm.told, "its start")
    training.slurm.becomes(number, "RUNNING", reason="None")
    assert len(training.slurm.all) == 5


@pytest.mark.parametrize("part", ["1", "coordinator"])
def test_what_slurm_ended_of_itself_is_submitted_anew_a_few_times(training, part):
    for number in range(replica_jobs._MOST_SUBMITS - 1):
        training.slurm.becomes(training.number(part), "NODE_FAIL")
        until(lambda number=number: len(training.slurm.all) == 6 + number, "another job")
    training.slurm.becomes(training.number(part), "NODE_FAIL")
    if part == "1":
        until(lambda: "replica 1 is given up" in training.handle.note(), "a word of it")
        training.until("coordinator", "0", "2", "3")
    else:
        assert "the coordinator of the replicas ended as NODE_FAIL" in training.end().message


def test_one_that_fails_is_given_up_while_there_are_enough(training):
    training.ends("3", "FAILED", outcome="failed", kind="failed", message="own code")
    training.ends("2", "CANCELLED")  # by hand
    until(lambda: "replica 2, 3 is given up" in training.handle.note(), "a word of it")
    assert training.slurm.alive() == ["0", "1", "coordinator"]
    training.ends("1", "FAILED", outcome="failed", kind="infrastructure", message="a rank died", time=2.0)
    ended = training.end()
    assert (ended.state, ended.kind, ended.message) == ("failed", "failed", "own code")
    assert training.slurm.alive() == []


def test_what_all_would_come_to_ends_all(training):
    training.ends("1", "FAILED", outcome="failed", kind="input", message="bad data")
    ended = training.end()
    assert (ended.kind, ended.message) == ("input", "bad data")
    assert training.slurm.told[-1] == ("USR2", "coordinator"), "after the replicas, which meet there"


def test_the_first_that_is_done_says_so_and_who_waits_in_the_queue_is_taken_out(training):
    training.slurm.becomes(training.number("3"), "PENDING")
    for part in ("0", "1", "2"):
        training.ends(part, "COMPLETED", outcome="done", step=9)
    assert training.end().state == "done"
    assert ("cancel", "3") in training.slurm.told
    assert not any(part in ("0", "1", "2") for _, part in training.slurm.told)


def test_a_coordinator_that_ends_before_who_has_done_it_is_no_failure(training, monkeypatch):
    monkeypatch.setattr(replica_jobs, "_OTHERS_SECONDS", 0.0)
    training.leaves("1", outcome="done", step=9)
    training.ends("coordinator", "COMPLETED")
    assert training.end().state == "done"


def test_a_cancel_is_told_to_all_and_ends_with_the_newest_save(training):
    training.handle.terminate()
    ended = training.end()
    assert (ended.state, (ended.outcome or {})["step"]) == ("cancelled", 3)
    assert training.slurm.alive() == []
    assert training.slurm.told[-1] == ("USR2", "coordinator")


def test_a_refusal_of_the_first_leaves_no_job(tmp_path, monkeypatch):
    monkeypatch.setattr(replica_jobs, "FIRST_POLL_SECONDS", 0.01)
    slurm = Stand(monkeypatch)
    slurm.refuses = lambda part: part == "0"
    ended = Training(tmp_path, slurm).end()
    assert (ended.state, ended.kind) == ("failed", "input")
    assert slurm.alive() == []
