"""Nothing is lost: processes killed in every role and at random moments, signals, restarts in place."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kit import plans, processes
from kit.command_runs import until

from mlpipe.observe.runview import view_stage
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.validation import BestPlan, MetricPlan, ValidatePlan
from mlpipe.plan.work import CallbackPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.store.runs import StageState

# each of many starts takes seconds, and more on a busy machine
pytestmark = [pytest.mark.torch, pytest.mark.timeout(1500)]

STEPS = 24
SEED = 20261121
MODELS = Path(plans.__file__).with_name("models.py")


def user(entry: str, **args: object) -> ModelPlan:
    return ModelPlan(Entry(f"kit.models:{entry}", dict(args)), None, 32, ())


class Stage:
    """One stage of two ddp workers, attempt after attempt, in its own store. It is slow (`seconds` a step)
    until `hurry`, so that there is time to strike."""

    def __init__(self, folder: Path, tokens: Path) -> None:
        self.folder, self.tokens = folder, tokens
        self.store = FolderStore(folder / "store")
        self.slow_file = folder / "slow"
        self.slow_file.touch()
        self.attempt = 0

    def next(self, *, seconds: float = 0.5, launch=None, **changes):
        self.attempt += 1
        changes.setdefault(
            "model", user("slow", seconds=seconds, while_file=str(self.slow_file), dropout=0.0)
        )
        changes.setdefault("every", 4)
        changes.setdefault("steps", STEPS)
        self.plan = plans.train_plan(
            self.folder / "store", self.tokens, attempt=self.attempt, launch=launch, **changes
        )
        self.scratch = self.folder / f"scratch-{self.attempt}"
        return self.plan

    def start(self):
        self.process = plans.start(self.plan, self.scratch)
        return self.process

    def run(self) -> int:
        return plans.launch(self.plan, self.scratch)

    def hurry(self) -> None:
        self.slow_file.unlink(missing_ok=True)

    def until_step(self, step: int) -> None:
        """Until this attempt has done a step after `step`."""
        until(
            lambda: self.process.poll() is not None or self.last_step() > step,
            f"step {step + 1}",
        )
        assert self.process.poll() is None, plans.log_of(self.scratch)

    def last_step(self) -> int:
        found = plans.records(self.folder / "store", self.plan)
        return max((record["step"] for record in found if record["kind"] == "step"), default=0)

    def outcome(self):
        return plans.outcome(self.folder / "store", self.plan)

    def final_digest(self) -> str:
        last = catalogue.latest(self.store, self.plan.stage_key)
        assert last.step == self.plan.work.steps
        return processes.digest_of(self.store, last.key)

    def log(self) -> str:
        return plans.log_of(self.scratch)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return plans.write_tokens(tmp_path_factory.mktemp("faults") / "tokens")


@pytest.fixture
def stage(tmp_path, tokens):
    stage = Stage(tmp_path, tokens)
    yield stage
    if process := getattr(stage, "process", None):
        processes.kill(processes.tree(process.pid))
        process.wait(300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory, tokens):
    """Digest of the last checkpoint of an uninterrupted run."""
    stage = Stage(tmp_path_factory.mktemp("expected"), tokens)
    stage.hurry()
    plans.run_together([stage.next()], stage.folder / "run")
    return stage.final_digest()


def test_killed_again_and_again_until_it_is_done(stage, expected, capsys):
    """In every role, once steps go, and everything at random moments since its start."""
    draw = random.Random(SEED)
    victims = ["torchrun", "launcher", "rank 0", "rank 1", "everything", "everything"]
    kills = losses = 0
    committed = 0
    for victim in victims:
        stage.next()
        process = stage.start()
        if kills == len(victims) - 1:
            time.sleep(draw.uniform(0.0, 3.0))  # while it starts
        else:
            stage.until_step(committed)
            time.sleep(draw.uniform(0.0, 0.4))
        everything = processes.tree(process.pid)
        torchrun = processes.torchrun_of(process)
        processes.kill(
            {
                "torchrun": [torchrun],
                "launcher": [process.pid],
                "rank 0": [processes.worker_of(stage.scratch, 0)],
                "rank 1": [processes.worker_of(stage.scratch, 1)],
                "everything": everything,
            }[victim]
        )
        kills += 1
        code = process.wait(300)
        until(lambda pids=everything: processes.gone(pids), f"the end of all after killing {victim}")
        assert code not in (0, 5), stage.log()
        if victim.startswith("rank"):
            assert code == 4
            assert f"{victim} was killed by SIGKILL" in stage.outcome()["message"]
        elif victim == "torchrun":
            assert (code, stage.outcome()["message"]) == (4, "torchrun was killed by SIGKILL")
        steps = processes.steps_of_sound(stage.store, stage.plan)
        losses += max(steps, default=0) < committed
        committed = max(steps, default=0)
    stage.hurry()
    stage.next()
    assert stage.run() == 0, stage.log()
    losses += stage.final_digest() != expected
    with capsys.disabled():
        print(f"\ntrainings killed: {kills} kills tried ({', '.join(victims)}), {losses} losses")
    assert losses == 0


def test_a_killed_rank_is_restarted_in_place(stage, expected):
    stage.hurry()
    counter = str(stage.folder / "counter")
    kill = user("misbehaving", what="kill", at=STEPS // 2, rank=1, counter=counter)
    stage.next(model=kill, launch={"max_restarts": 1})
    assert stage.run() == 0, stage.log()
    assert stage.outcome()["restarts"] == 1
    assert stage.final_digest() == expected
    starts = [r for r in plans.records(stage.folder / "store", stage.plan) if r["kind"] == "start"]
    assert [record["restart"] for record in starts] == [0, 1]
    assert starts[1]["start_step"] in (4, 8)  # 8 may still have been on its way to the store

    # every rank-second of it is in one bucket
    stage.store.put(f"{stage.plan.attempt_key}/plan.json", stage.plan.to_json().encode())
    view = view_stage(stage.store, "run", "train", StageState("done", 1), [])
    assert view.ledger is not None
    seconds = view.ledger.seconds
    launched, _ = (event.time for event in view.attempts[0].events)
    assert view.ledger.total == pytest.approx(2 * (stage.outcome()["time"] - launched), rel=0.01)
    for bucket in ("startup", "init", "restore", "compute", "communication", "lost"):
        assert seconds[bucket] > 0, seconds
    assert seconds["queue"] == seconds["hang"] == 0
    assert view.ledger.tokens == STEPS * 16 * 32


def test_killed_within_a_validation_and_within_the_saves_of_a_best_one_it_ends_as_it_would_have(
    stage, tokens
):
    """Three blows at all processes, each where a rank stands still, and the rest: the losses, the validations
    and the best checkpoint of a training that nobody struck, and nothing half-written."""
    nearness = MetricPlan("nearness", "kit.struck:Nearness")
    validate = ValidatePlan(2, 9 * 32, (nearness,), best=BestPlan("nearness", "max"))
    asked = {
        "strategy": "fsdp", "model": ModelPlan(Entry("kit.struck:build_model", {}), None, 32, ()),
        "steps": 8, "every": 100, "validate": validate,
    }  # fmt: skip
    whole = plans.train_plan(stage.folder / "whole", tokens, **asked)
    plans.run_together([whole], stage.folder / "run")
    for at in ("validating", "writing", "committing"):
        stage.next(**asked)
        there = stage.folder / at
        env = plans.environment() | {"KIT_STRIKE": json.dumps({"at": at, "step": 4, "file": str(there)})}
        stage.process = plans.start(stage.plan, stage.scratch, env=env)
        until(lambda there=there: there.exists() or stage.process.poll() is not None, f"a rank {at}")
        assert stage.process.poll() is None, stage.log()
        until(lambda: processes.steps_of_sound(stage.store, stage.plan), "the save of step 2, beside it")
        everything = processes.tree(stage.process.pid)
        processes.kill(everything)
        stage.process.wait(300)
        until(lambda pids=everything: processes.gone(pids), "the end of all")
        assert processes.steps_of_sound(stage.store, stage.plan) == [2]
    stage.next(**asked)
    assert stage.run() == 0, stage.log()

    store = FolderStore(stage.folder / "whole")
    attempts = [replace(stage.plan, attempt=attempt) for attempt in range(1, stage.attempt + 1)]
    found = [one for plan in attempts for one in plans.records(stage.folder / "store", plan)]
    expected = plans.records(stage.folder / "whole", whole)
    assert told(found) == told(expected)
    assert len(told(expected)) == 8 + 4
    # what was struck is gone: the objects, by their prefixes, are those of three checkpoints
    assert processes.steps_of_sound(stage.store, stage.plan) == [2, 4, 8]
    prefixes = {
        info.key.rpartition("/")[0] for info in stage.store.list(f"{stage.plan.stage_key}/checkpoints")
    }
    assert prefixes == {one.key for one in catalogue.list_checkpoints(stage.store, stage.plan.stage_key)}
    best, same = catalogue.best(stage.store, stage.plan.stage_key), catalogue.best(store, whole.stage_key)
    assert best is not None
    assert same is not None
    assert (best.step, processes.digest_of(stage.store, best.key)) == (
        4,
        processes.digest_of(store, same.key),
    )
    assert catalogue.read_best(stage.store, best.key) == catalogue.read_best(store, same.key)
    assert stage.final_digest() == processes.digest_of(store, catalogue.latest(store, whole.stage_key).key)


def told(records):
    """What was measured at each step, and in each validation: the last word on it."""
    fields = ("loss", "grad_norm", "metrics", "best")
    return {
        (one["kind"], one["step"]): [one.get(field) for field in fields]
        for one in records
        if one["kind"] in ("step", "validation")
    }


def test_six_restarts_in_place(stage):
    """Of which none leaves a file or a thread in what goes on."""
    stage.hurry()
    counter = str(stage.folder / "counter")
    # Two forwards are the rehearsal. A restart adds one step or two: the second may still be committed.
    kill = user("misbehaving", what="kill", at=5, rank=1, counter=counter, times=6)
    held = CallbackPlan("kit.heard:Looks", {"file": str(stage.folder / "held")}, "first")
    stage.next(model=kill, every=1, steps=2 * 6 + 4, launch={"max_restarts": 6}, callbacks=(held,))
    began = time.monotonic()
    assert plans.launch(stage.plan, stage.scratch, timeout=1200) == 0, stage.log()
    assert stage.outcome()["restarts"] == 6
    print(f"6 restarts in place took {time.monotonic() - began:.0f} s")
    lines = (stage.folder / "held").read_text().splitlines()
    (_, second, *_, last) = map(json.loads, lines)
    assert len(lines) == 7
    # of what each restart left open, however little, there would be five by now
    assert all(now - before < 5 for now, before in zip(last, second, strict=True)), lines


def test_signals_save_and_resume_is_exact(stage, expected):
    # a step takes long: the save waits for its end
    stage.next(every=100)
    process = stage.start()
    stage.until_step(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 5, stage.log()
    found = stage.outcome()
    assert (found["outcome"], found["exit_code"]) == ("saved", 5)
    assert found["step"] == stage.last_step() < STEPS
    assert processes.steps_of_sound(stage.store, stage.plan) == [found["step"]]

    # torchrun itself
    stage.next(every=100)
    process = stage.start()
    stage.until_step(found["step"])
    torchrun = processes.torchrun_of(process)
    assert torchrun
    os.kill(torchrun, signal.SIGTERM)
    assert process.wait(300) == 5, stage.log()
    again = stage.outcome()
    assert again["outcome"] == "saved"
    assert processes.steps_of_sound(stage.store, stage.plan) == [found["step"], again["step"]]

    # before the first step was done: at once, and ranks are not started anew
    stage.next(seconds=600.0, every=100)
    process = stage.start()
    until(lambda: processes.worker_of(stage.scratch, 1), "the workers")
    everything = processes.tree(process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(300) == 5, stage.log()
    assert (stage.outcome()["outcome"], stage.outcome()["kind"]) == ("failed", "cancelled")
    assert stage.outcome()["restarts"] == 0
    until(lambda: processes.gone(everything), "the workers' end")
    assert processes.steps_of_sound(stage.store, stage.plan) == [found["step"], again["step"]]

    stage.hurry()
    stage.next()
    assert stage.run() == 0, stage.log()
    assert stage.final_digest() == expected


def test_nan_ends_the_run_and_keeps_the_last_good_checkpoint(stage):
    stage.hurry()
    stage.next(model=user("misbehaving", what="nan", at=2 + 7, rank=1), launch={"max_restarts": 3})
    assert stage.run() == 3
    found = stage.outcome()
    assert "the loss is not finite at step 7 on rank 1" in found["message"]
    assert found["restarts"] == 0
    assert found["cause"] == "not_finite"
    for rank in (0, 1):
        last = plans.records(stage.folder / "store", stage.plan, rank)[-1]
        assert (last["kind"], last["step"], last["loss"]) == ("step", 7, None)
    assert processes.steps_of_sound(stage.store, stage.plan) == [4]
    assert stage.next(steps=5)
    assert stage.run() == 0, stage.log()
    assert stage.last_step() == 5


def test_an_exception_in_the_users_model_is_told_in_its_words(stage):
    stage.hurry()
    stage.next(model=user("misbehaving", what="raise", at=2 + 3, rank=1), launch={"max_restarts": 1})
    assert stage.run() == 3
    found = stage.outcome()
    words, _, call = found["message"].partition("\n")
    assert words == "ValueError: this model does not like this batch (after 1 restarts)"
    assert "kit/models.py" in call
    assert 'raise ValueError("this model does not like this batch")' in call
    assert "rank 1" in found["where"]
    assert found["restarts"] == 1


def test_a_rank_without_memory_is_tried_once_more_and_told_what_takes_less(stage):
    """Torch's error is raised by the model: on a CPU nobody runs out of a GPU's memory."""
    stage.hurry()
    stage.next(model=user("misbehaving", what="memory", at=2 + 3, rank=1), launch={"max_restarts": 9})
    assert stage.run() == 3
    found = stage.outcome()
    assert (found["cause"], found["kind"], found["step"], found["restarts"]) == (
        "out_of_memory", "failed", 2, 1
    )  # fmt: skip
    assert found["message"].startswith(
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.; again"
    )
    assert "kit/models.py" in found["message"]
    assert "activation_checkpointing: full (it was none), strategy: fsdp, offload" in found["hint"]


def test_the_rank_that_is_stopped_is_named_not_the_one_that_waits(stage):
    # Rank 0 waits for so long, idle: nor is a step long that takes as many seconds on a busy machine.
    stage.next(hang_timeout_seconds=30.0, launch={"max_restarts": 3})
    stage.start()
    stage.until_step(2)
    os.kill(processes.worker_of(stage.scratch, 1), signal.SIGSTOP)
    assert stage.process.wait(300) == 3, stage.log()
    found = stage.outcome()
    assert found["message"].startswith("rank 1 is stopped, by a signal (SIGSTOP)")
    assert (found["where"], found["cause"], found["restarts"]) == ("rank 1", "hang", 0)
    waited = json.loads((stage.scratch / "fatal-0.json").read_text())
    assert "waits for other ranks" in waited["message"]


def test_a_hang_is_ended_and_every_rank_shows_its_stacks(stage):
    stage.hurry()
    hang = user("misbehaving", what="hang", at=2 + 3, rank=1)
    stage.next(model=hang, launch={"max_restarts": 3})
    assert stage.run() == 3
    found = stage.outcome()
    assert found["message"].startswith("rank 1 hangs: nothing moved for ")
    assert found["restarts"] == 0
    folder = stage.folder / "store" / stage.plan.attempt_key / "postmortem"
    stacks = {path.name: path.read_text() for path in folder.glob("stacks-*")}
    assert sorted(stacks) == ["stacks-rank-0.txt", "stacks-rank-1.txt"]
    sleeping = next(
        number
        for number, text in enumerate(MODELS.read_text().splitlines(), start=1)
        if "time.sleep(600)" in text
    )
    assert f'models.py", line {sleeping} in forward' in stacks["stacks-rank-1.txt"]
