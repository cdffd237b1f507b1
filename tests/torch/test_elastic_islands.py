"""Islands that come and go: in threads of this process around a real coordinator, each of which dies or comes
at a point of a round that is chosen; what they learn is what a simulation says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.command_runs import until

from mlpipe.plan.updates import IslandsPlan, OptimizerPlan
from mlpipe.train.loop import Loop
from mlpipe.train.optim.islands import local_updates
from mlpipe.train.optim.make import make_update
from mlpipe.train.parallel.waits import Waits
from mlpipe.train.replicas import elastic_loop
from mlpipe.train.replicas.coordinator import Coordinator
from mlpipe.train.replicas.elastic_loop import ElasticLoop
from mlpipe.train.replicas.membership import Membership
from mlpipe.train.replicas.replicas import Replicas
from mlpipe.train.resuming import Position
from mlpipe.train.shards import LocalShard

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]
STEPS, BATCH, LR = 11, 16, 0.1
SGD = OptimizerPlan("sgd", None, {"momentum": 0.9, "weight_decay": 0.0}, 0, LR, 0.0, "constant", 0, 0, 0.0)


class Dies(Exception):
    """The replica is gone."""


def gradient(number: int, index: int, size: int) -> torch.Tensor:
    """Of a share of a step's samples."""
    return torch.randn(64, generator=torch.Generator().manual_seed(100 * number + 10 * size + index))


def mini_step(loop: Any) -> tuple[bool, bool]:
    """`Loop.step`, as far as others hear of it."""
    number, (index, size) = loop.position.step + 1, loop.reader.loader.share
    loop.at(f"step {number}")
    loop.owes.append(any(one.any().item() for part in loop.update._parts for one in part.unsent))
    loop.taken.append((number, index, size))
    loop.parameter.grad = gradient(number, index, size)
    totals = torch.tensor([1.0, 1.0, 2.0, 8.0, 0.0, 0.0], dtype=torch.float64)
    loop.total(totals)
    assert loop.model.waits.take() == (0.0, 0.0), "the loop's own clock has it"
    assert totals.tolist() == [size, size, 2.0, 8.0 * size, 0.0, 0.0]
    rounds = loop.update.num_rounds
    loop.update.step(lr=LR, scale=1.0)
    assert (sum(loop.model.waits.take()) > 0.0) == (loop.update.num_rounds > rounds)
    loop.at(f"after {number}")
    loop.position.step, loop.position.samples = number, loop.position.samples + BATCH
    return bool(totals[4]), False


class Island:
    """Of one replica: `at(where)` is called at the points of its way."""

    def __init__(self, number: int, islands: IslandsPlan, at: Callable[[str], None]) -> None:
        self.number, self.at, self.told_to_stop = number, at, False
        self.parameter = torch.nn.Parameter(torch.zeros(64))
        self.shard = LocalShard("model.a", self.parameter.detach(), (64,), (0,), 0, 1, self.parameter)
        plan: Any = SimpleNamespace(
            optimizer=SGD,
            compress=None,
            steps=STEPS,
            global_batch=BATCH,
            checkpoint=SimpleNamespace(every_steps=9),
        )
        nothing = lambda *_, **__: None  # noqa: E731
        world = SimpleNamespace(rank=0, size=1, data_rank=0, num_data_ranks=1, num_gradient_ranks=1)
        session: Any = SimpleNamespace(
            replica=number,
            num_replicas=1,
            world=world,
            process=SimpleNamespace(restart=0),
            watchdog=SimpleNamespace(beat=nothing, still=nothing),
            stop=SimpleNamespace(requested=lambda: self.told_to_stop, scratch=None),
            plan=SimpleNamespace(run_id="run"),
        )
        model: Any = SimpleNamespace(
            shards=[self.shard], waits=Waits(), kept=None, stored=lambda: [self.shard], after_step=nothing
        )
        self.update = local_updates(islands, make_update(SGD, [self.shard]), model, world, whole=True)
        loader: Any = SimpleNamespace(share=(0, 1))
        self.replicas = Replicas(session, plan, model, self.update, loader)
        self.loop: Any = ElasticLoop(
            session=session,
            plan=plan,
            model=model,
            update=self.update,
            schedule=None,
            reader=SimpleNamespace(loader=loader, forget=nothing),
            checkpointer=SimpleNamespace(wait_for_staging=nothing),
            recording=SimpleNamespace(of_replicas={}, last=None),
            position=Position(),
            progress=[0],
            profiling=None,
            replicas=self.replicas,
        )
        self.loop.parameter, self.loop.at, self.loop.taken = self.parameter, at, []
        self.loop.owes: list[bool] = []
        self.saves: list[int] = []  # of rounds that it only ended
        together = self.replicas.together

        def agree(step: int, *given: Any) -> Any:
            if self.update.due:
                at(f"round {step}")
            return together(step, *given)

        self.replicas.together = agree
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.position = self.replicas.enter(Position)
            self.begun_at = self.loop.position.step
            stopping = False
            while self.loop.position.step < STEPS and not stopping:
                stopping, save = self.loop.step()
                self.saves += [self.loop.position.step] if save else []
        except Dies:
            self.replicas.member._socket.close()

    def end(self) -> torch.Tensor:
        self.thread.join(120)
        assert not self.thread.is_alive()
        return self.shard.local


class Simulated:
    """Island and anchor, with the sums of both steps."""

    def __init__(self, outer_momentum: float) -> None:
        self.anchor, self.outer, self.m = torch.zeros(64), torch.zeros(64), outer_momentum

    def island(self) -> Any:
        return SimpleNamespace(weights=self.anchor.clone(), momentum=torch.zeros(64))

    def step(self, island: Any, number: int, index: int, size: int) -> None:
        island.momentum = 0.9 * island.momentum + gradient(number, index, size)
        island.weights = island.weights - LR * island.momentum

    def agree(self, *islands: Any) -> None:
        mean = sum(self.anchor - one.weights for one in islands) / len(islands)
        self.outer = self.m * self.outer + mean
        self.anchor = self.anchor - 0.7 * (mean + self.m * self.outer)
        for one in islands:
            one.weights = self.anchor.clone()


def around(monkeypatch: pytest.MonkeyPatch, num_replicas: int) -> Membership:
    """A coordinator that the islands of this process find."""
    membership = Membership(1, 1, num_replicas, 2)
    monkeypatch.setenv("MLPIPE_COORDINATOR", Coordinator(membership, "127.0.0.1", 300.0).where)
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(elastic_loop.dist, "all_reduce", lambda tensor: None)
    monkeypatch.setattr(Loop, "step", mini_step)
    return membership


def test_who_was_away_while_the_others_agreed_takes_no_outer_step_of_its_own(monkeypatch):
    """Replica 1 loses its connection when it is about to agree in step 3, and comes back when replica 0 has
    gone on alone."""
    membership, started = around(monkeypatch, 2), {}

    def away() -> None:
        started[1].replicas.member._socket.shutdown(socket.SHUT_RDWR)
        until(lambda: membership.committed >= (3, 5), "steps of the other one")

    def at(where: str) -> None:
        if where == "step 8":  # not the end before it is back
            until(lambda: 1 in membership._joined() or len(membership.quorums) > 3, "its return")

    plan = IslandsPlan(3, outer_lr=0.7, outer_momentum=0.5)
    started[0] = Island(0, plan, at)
    started[1] = Island(1, plan, lambda where: away() if where == "round 3" else None)
    found = [started[number].end() for number in (0, 1)]
    assert torch.equal(*found)
    assert [started[number].loop.position.samples for number in (0, 1)] == 2 * [STEPS * BATCH]
    assert [number for number, *_ in started[0].loop.taken] == list(range(1, STEPS + 1))
    steps = [number for number, *_ in started[1].loop.taken]
    assert steps[:3] == [1, 2, 3]
    assert steps[3:] == list(range(int(membership.quorums[-1].step) + 1, STEPS + 1))
    assert steps[3] > 5


@pytest.mark.parametrize("compress", [None, "int8"])
def test_who_dies_or_comes_in_the_middle_of_a_round_costs_the_others_nothing(compress, monkeypatch):
    """Rounds of 3. Replica 1 dies in step 5, replica 2 comes after step 7 and dies when all are about to
    agree in step 9, of which replica 3 hears, who has waited, in the midst. It is told to stop in step 10,
    and tells what it has learnt before it leaves. The last round ends early."""
    plan = IslandsPlan(3, outer_lr=0.7, outer_momentum=0.5, compress=compress)
    membership = around(monkeypatch, 3)
    started: dict[int, Island] = {}

    def waits(number: int) -> None:
        until(lambda: number in membership._joined(), f"replica {number}")

    def begin(number: int, **events: Callable[[], None]) -> None:
        named = {where.replace("_", " ").replace("half", "."): what for where, what in events.items()}
        started[number] = Island(number, plan, lambda where: named.get(where, lambda: None)())

    def die() -> None:
        raise Dies

    def third() -> None:
        begin(3, step_10=stop)
        waits(3)
        raise Dies

    def stop() -> None:
        started[3].told_to_stop = True

    def second() -> None:
        begin(2, round_9=third)
        waits(2)

    begin(0, step_7=second)
    begin(1, step_5=die)
    found: dict[int, Any] = {number: started[number].end() for number in (0, 3)}
    assert started[0].loop.taken == [
        *((number, 0, 2) for number in (1, 2, 3, 4)),
        (5, 0, 2),
        *((number, 0, 1) for number in (5, 6, 7)),
        *((number, 0, 2) for number in (8, 9, 10)),
        (11, 0, 1),
    ]
    assert [started[number].begun_at for number in (2, 3)] == [7, 8]
    assert started[3].loop.taken == [(10, 1, 2)]
    assert (started[3].saves, started[0].saves) == ([9], [])
    assert started[3].loop.position.samples == 10 * BATCH
    assert not started[3].loop.released, "it left with the step, nobody being lost"
    assert started[0].loop.owes[7] == (compress is not None)
    assert not started[2].loop.owes[0], "what another one owes"
    assert [one.members for one in membership.quorums] == [(0, 1), (0, 1), (0,), (0, 2), (0, 3), (0,)]
    assert [one.step for one in membership.quorums][2:] == [4, 7, 8.5, 10]

    sim = Simulated(0.5)
    first, other = sim.island(), sim.island()
    for number in (1, 2, 3):
        sim.step(first, number, 0, 2)
        sim.step(other, number, 1, 2)
    sim.agree(first, other)
    for number, size in ((4, 2), (5, 1), (6, 1)):
        sim.step(first, number, 0, size)
    sim.agree(first)
    for number, size in ((7, 1), (8, 2), (9, 2)):
        sim.step(first, number, 0, size)
    third_one = SimpleNamespace(**vars(first))
    sim.agree(first, third_one)
    sim.step(first, 10, 0, 2)
    sim.step(third_one, 10, 1, 2)
    sim.agree(first, third_one)
    tolerance = {"rtol": 0.0, "atol": 1e-6 if compress is None else 0.02}
    torch.testing.assert_close(found[3], sim.anchor, **tolerance)
    sim.step(first, 11, 0, 1)
    sim.agree(first)
    torch.testing.assert_close(found[0], sim.anchor, **tolerance)
    assert [started[number].update.num_rounds for number in (0, 3)] == [5, 4]
