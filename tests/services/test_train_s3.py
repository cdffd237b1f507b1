"""Trainings whose store is a bucket: records, resume, the store away for a while and for ever, kills."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
from kit import plans, processes
from kit.command_runs import until
from kit.faultproxy import Fault

from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.store import catalogue
from mlpipe.store.s3 import S3Store

pytestmark = [pytest.mark.services, pytest.mark.timeout(1200)]

STEPS = 30
LONG = 300  # of a training that does not end before it is struck
MORE = 4  # of one that goes on afterwards
SEED = 20261121
NUM_KILLS = 3
# Each costs minutes, and what differs between makes of servers is asked of both in the tests of the store.
one_server = pytest.mark.parametrize("server", ["minio"], indirect=True)


class Trainings:
    """Attempts of one stage of two ddp workers that save every two steps through the proxy."""

    def __init__(self, folder, server, proxy, url) -> None:
        self.folder, self.server, self.proxy, self.url = folder, server, proxy, url
        self.tokens = plans.write_tokens(folder / "tokens")
        self.slow_file = folder / "slow"
        self.slow_file.touch()
        self.store = S3Store.from_environment(url, server.environment())
        self.attempt = 0

    def start(
        self, *, seconds: float = 0.0, deadline_seconds: float = 60.0, steps: int = STEPS, every: int = 2
    ):
        self.attempt += 1
        slow = {"seconds": seconds, "while_file": str(self.slow_file), "dropout": 0.0}
        self.plan = plans.train_plan(
            self.url,
            self.tokens,
            attempt=self.attempt,
            steps=steps,
            every=every,
            model=ModelPlan(Entry("kit.models:slow", slow), None, 32, ()),
        )
        self.scratch = self.folder / f"scratch-{self.attempt}"
        env = {
            **plans.environment(),
            **self.server.environment(self.proxy.endpoint),
            "MLPIPE_STORE_DEADLINE_SECONDS": str(deadline_seconds),
        }
        self.process = plans.start(self.plan, self.scratch, env=env)
        return self.process

    def until_committed(self, step: int) -> None:
        until(
            lambda: self.process.poll() is not None or self.last_step() >= step,
            f"the checkpoint of step {step}",
        )
        assert self.process.poll() is None, self.log()

    def last_step(self) -> int:
        found = catalogue.latest(self.store, self.plan.stage_key)
        return found.step if found else 0

    def kill(self) -> None:
        everything = processes.tree(self.process.pid)
        processes.kill(everything)
        self.process.wait(300)
        until(lambda: processes.gone(everything), "the end of all")

    def records(self, rank: int = 0):
        data, _ = self.store.read_log(f"{self.plan.attempt_key}/records/rank-{rank}.jsonl")
        return plans.lines(data)

    def log(self) -> str:
        return plans.log_of(self.scratch)


@pytest.fixture
def trainings(tmp_path, server, proxy, url) -> Iterator[Trainings]:
    made = Trainings(tmp_path, server, proxy, url)
    yield made
    if process := getattr(made, "process", None):
        processes.kill(processes.tree(process.pid))
        process.wait(300)


def test_a_training_survives_a_store_that_is_away_and_leaves_its_records(trainings, proxy):
    process = trainings.start(seconds=0.2)
    trainings.until_committed(4)
    proxy.away("refuse")
    timer = threading.Timer(6.0, proxy.back)
    timer.start()
    assert process.wait(300) == 0, trainings.log()
    timer.join(300)
    assert not timer.is_alive()
    assert processes.steps_of_sound(trainings.store, trainings.plan) == [STEPS - 4, STEPS - 2, STEPS]
    for rank in (0, 1):
        records = trainings.records(rank)
        steps = [record["step"] for record in records if record["kind"] == "step"]
        assert steps == list(range(1, STEPS + 1))
    assert [r["kind"] for r in trainings.records()][-1] == "end"


@one_server
def test_a_store_that_stays_away_ends_a_training_with_one_clear_error(trainings, proxy):
    # each of the last words, records and logs of all processes waits for so long, in turn
    process = trainings.start(seconds=0.2, deadline_seconds=5, steps=LONG)
    trainings.until_committed(4)
    proxy.away("refuse")
    assert process.wait(300) == 4, trainings.log()
    errors = [line for line in trainings.log().splitlines() if line.startswith("error: ")]
    assert "did not serve" in errors[0]
    proxy.back()
    sound = processes.steps_of_sound(trainings.store, trainings.plan)
    assert sound[-1] >= 4
    # and the next attempt goes on from there
    trainings.slow_file.unlink()
    last = sound[-1] + MORE
    assert trainings.start(steps=last, every=100).wait(300) == 0, trainings.log()
    start = next(record for record in trainings.records() if record["kind"] == "start")
    assert start["start_step"] == sound[-1]
    assert processes.steps_of_sound(trainings.store, trainings.plan)[-1] == last


@one_server
def test_killed_at_random_requests_a_training_loses_nothing(trainings, proxy, server, capsys):
    draw = random.Random(SEED)
    committed = kills = losses = numbered = 0
    while kills < NUM_KILLS:
        process = trainings.start(seconds=0.2, steps=LONG)
        trainings.until_committed(committed + 2)
        at = draw.randint(1, 20)
        # the proxy kills one worker at this very request; the rest goes with it
        proxy.arm(
            Fault(at=at, how="kill-lose", pid=processes.worker_of(trainings.scratch, draw.randint(0, 1)))
        )
        struck = proxy.wait_fired(30)
        trainings.kill()
        kills += 1
        numbered += at if struck else 0
        proxy.arm()
        assert process.returncode != 0
        sound = processes.steps_of_sound(trainings.store, trainings.plan)
        losses += max(sound, default=0) < committed
        committed = max(sound, default=0)
    trainings.slow_file.unlink()
    last = committed + MORE
    assert trainings.start(steps=last, every=100).wait(300) == 0, trainings.log()
    losses += processes.steps_of_sound(trainings.store, trainings.plan)[-1] != last
    with capsys.disabled():
        print(
            f"\n{server.name}: trainings killed at a request of a save: {kills} kills tried, {losses} losses"
        )
    assert losses == 0
