"""Islands that learn by themselves and agree now and then: the same as averaged gradients where that is
exact, the same after a resume in the middle of a round, and every island has the same weights in a
checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import plans
from kit.thread_ranks import on_ranks

from mlpipe.plan.plan import Replicas
from mlpipe.plan.updates import IslandsPlan, OptimizerPlan
from mlpipe.plan.validation import ValidatePlan
from mlpipe.plan.work import CallbackPlan
from mlpipe.store import replicas
from mlpipe.store.folder import FolderStore
from mlpipe.train.optim.islands import LocalUpdates
from mlpipe.train.optim.make import make_update
from mlpipe.train.optim.sender import Sender
from mlpipe.train.shards import LocalShard

pytestmark = pytest.mark.torch
STEPS, KILLED_AFTER = 8, 5
DILOCO = IslandsPlan(sync_every=3, outer_lr=0.7, outer_momentum=0.5, compress="int8", fragments=2)
STALE = DILOCO._replace(staleness=2)


def sgd(momentum: float = 0.0) -> OptimizerPlan:
    args = {"momentum": momentum, "weight_decay": 0.0}
    return OptimizerPlan("sgd", None, args, 0, 1e-2, 0.0, "constant", 0, 0, 0.0)


def test_the_outer_step_is_torchs_nesterov() -> None:
    """Two islands over several rounds beside `torch.optim.SGD(nesterov=True)` of the mean of what they
    learnt."""
    plan, rounds, every = IslandsPlan(2, outer_lr=0.7, outer_momentum=0.5), 4, 2
    start = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))

    def gradient(rank: int, step: int) -> torch.Tensor:
        return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))

    def work(link: Any) -> torch.Tensor:
        parameter = torch.nn.Parameter(start.clone())
        shard = LocalShard("a", parameter.detach(), (5, 3), (0, 0), 0, 2, parameter)
        update = LocalUpdates(plan, make_update(sgd(), [shard]), [shard], link.ranks)
        for step in range(rounds * every):
            parameter.grad = gradient(link.ranks.rank, step)
            update.step(lr=0.1, scale=1.0)
        return shard.local

    outer = torch.nn.Parameter(start.clone())
    reference = torch.optim.SGD([outer], lr=0.7, momentum=0.5, nesterov=True)
    for first in range(0, rounds * every, every):
        told = [0.1 * gradient(rank, first + step) for step in range(every) for rank in range(2)]
        outer.grad = torch.stack(told).sum(0) / 2
        reference.step()
    found = on_ranks(2, work)
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[0], outer.detach())


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_is_heard_later_leaves_what_was_learnt_since(fragments: int) -> None:
    """Beside a simulation of both islands: what one told S steps ago is replaced by the outer step of the
    means, and the last round is heard at the end."""
    plan = IslandsPlan(3, outer_lr=0.7, outer_momentum=0.5, fragments=fragments, staleness=2)
    starts, steps = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)), 8

    def gradient(rank: int, step: int, number: int) -> torch.Tensor:
        return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * number + 10 * step + rank))

    def work(link: Any) -> list[torch.Tensor]:
        parameters = [torch.nn.Parameter(start.clone()) for start in starts]
        shards = [
            LocalShard(str(number), one.detach(), (5, 3), (0, 0), 0, 2, one)
            for number, one in enumerate(parameters)
        ]
        update = LocalUpdates(plan, make_update(sgd(), shards), shards, link.ranks)
        for step in range(steps):
            for number, parameter in enumerate(parameters):
                parameter.grad = gradient(link.ranks.rank, step, number)
            update.step(lr=0.1, scale=1.0)
            if step == 3:
                update.settle()
        update.finish()
        assert update.scalars()["num_rounds"] == 3
        return [shard.local for shard in shards]

    def simulated(number: int) -> torch.Tensor:
        anchor, momentum = starts[number].clone(), torch.zeros(5, 3)
        weights, told, told_at = [anchor.clone(), anchor.clone()], None, 0
        turn = 0 if fragments == 1 or number == 0 else 1

        def hear() -> None:
            nonlocal told
            mean = (told[0] + told[1]) / 2
            momentum.mul_(0.5).add_(mean)
            outer = 0.7 * (mean + 0.5 * momentum)
            anchor.sub_(outer)
            for rank in range(2):
                weights[rank] += told[rank] - outer
            told = None

        for step in range(steps):
            for rank in range(2):
                weights[rank] -= 0.1 * gradient(rank, step, number)
            if told is not None and step - told_at >= 2:
                hear()
            if (step + 1 - turn) % 3 == 0:
                told, told_at = [anchor - one for one in weights], step
            if step == 3 and told is not None:
                hear()
        if told is not None:
            hear()
        if told_at != steps - 1:
            told = [anchor - one for one in weights]
            hear()
        torch.testing.assert_close(weights[0], weights[1])
        return weights[0]

    for found in on_ranks(2, work):
        for number, weights in enumerate(found):
            torch.testing.assert_close(weights, simulated(number))


def test_what_cannot_be_sent_is_raised_where_it_is_waited_for() -> None:
    def lost() -> None:
        raise ConnectionError("reset by peer")

    with pytest.raises(ConnectionError, match="reset by peer"):
        Sender(torch.device("cpu")).send(lost).wait()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("islands")
    tokens, store = plans.write_tokens(folder / "tokens"), folder / "store"

    def plan_of(run_id: str, local: IslandsPlan | None = None, *, steps: int = STEPS, **changes: Any) -> Any:
        changes = {"every": STEPS // 2, "islands": local, **changes}
        return plans.train_plan(store, tokens, steps=steps, run_id=run_id, **changes)

    def forget_the_last(plan: Any) -> None:
        (newest,) = (store / plan.stage_key / "checkpoints").glob(f"step-*{STEPS}")
        shutil.rmtree(newest)

    nesterov = IslandsPlan(3, outer_lr=0.7, outer_momentum=0.5)
    made = [
        plan_of("ddp", optimizer=sgd()),
        plan_of("every-step", IslandsPlan(1), optimizer=sgd()),
        plan_of("adamw"),
        plan_of("pair", nesterov),
        plan_of("diloco", DILOCO),
        plan_of("watched", DILOCO, validate=ValidatePlan(4, 512, ())),
        plan_of("stale", STALE),
        plan_of("begun", steps=STEPS // 2),
        plan_of("begun", DILOCO, attempt=2),
    ]
    plans.run_together(made, folder / "two")
    hsdp: dict[str, Any] = {"world_size": 4, "strategy": "hsdp"}
    of_four = [
        plan_of("hsdp", nesterov, **hsdp),
        plan_of("stale-hsdp", nesterov._replace(staleness=2), **hsdp),
    ]
    plans.run_together(of_four, folder / "four")
    coming = {"strategy": "single", "world_size": 1, "micro_batch": 16}
    kill = CallbackPlan("kit.heard:Kills", {"rank": 1, "step": KILLED_AFTER}, "all")
    launch = {"replicas": Replicas(2, 3), "max_restarts": 1}
    elastic = plan_of("elastic", DILOCO, launch=launch, callbacks=(kill,), **coming)
    replicas.want(FolderStore(store), elastic.attempt_key, 2)
    assert plans.launch(elastic, folder / "elastic") == 0, plans.log_of(folder / "elastic")
    of_four.append(elastic)
    for plan in (made[4], made[5], made[6], *of_four[::2]):
        forget_the_last(plan)
    again = [plan_of(name, local, attempt=2) for name, local in (("diloco", DILOCO), ("stale", STALE))]
    again.append(plan_of("elastic", DILOCO, attempt=2))
    plans.run_together(again, folder / "two-again")
    more = [plan_of("hsdp", nesterov, attempt=2, **hsdp), plan_of("watched", DILOCO, attempt=2, world_size=4)]
    plans.run_together(more, folder / "four-again")
    return {(plan.run_id, plan.attempt): plan for plan in made + of_four + again + more}, store


@pytest.mark.combines("dp_replicate", "update local_sgd")
def test_agreeing_in_every_step_is_averaging_gradients(trained) -> None:
    """Of an optimizer that is linear in the gradient."""
    made, store = trained
    assert plans.losses(store, made["every-step", 1]) == pytest.approx(
        plans.losses(store, made["ddp", 1]), rel=1e-5
    )


@pytest.mark.combines("dp_replicate", "update diloco")
@pytest.mark.combines("validate", "update diloco")
def test_islands_learn(trained) -> None:
    made, store = trained
    plain, islands = (plans.losses(store, made[name, 1]) for name in ("adamw", "diloco"))
    assert islands[0] == plain[0]
    assert islands == pytest.approx(plain, rel=0.03)
    # a validation measures the anchors, and puts the island's weights back
    assert plans.losses(store, made["watched", 1]) == islands
    steps = [one for one in plans.records(store, made["diloco", 1]) if one["kind"] == "step"]
    assert [one["rounds"] for one in steps] == [0, 0, 1, 1, 1, 2, 2, 3]
    sent = [one["exchanged_bytes"] for one in steps]
    assert [bool(number) for number in sent] == [True, False, True, True, False, True, True, True]
    assert steps[0]["exchanged_plain_bytes"] == 4 * plans.CONFIG.num_params()


@pytest.mark.combines("dp_shard", "update diloco")
@pytest.mark.combines("dp_shard", "update local_sgd")
def test_an_island_may_be_several_workers(trained) -> None:
    made, store = trained
    pair = plans.losses(store, made["pair", 1])
    assert plans.losses(store, made["hsdp", 1]) == pytest.approx(pair, rel=1e-4)


def test_islands_that_come_and_go_learn_the_same(trained) -> None:
    """To the bit until one is killed in the middle of a round. The other one does not begin again, and heals
    it when it is back."""
    made, store = trained
    for field in ("loss", "grad_norm", "rounds", "exchanged_bytes", "exchanged_plain_bytes"):
        fixed, elastic = (plans.by_step(store, made[name, 1], field) for name in ("diloco", "elastic"))
        assert elastic[:KILLED_AFTER] == fixed[:KILLED_AFTER], field
        assert len(elastic) == STEPS
    plain, islands = (plans.losses(store, made[name, 1]) for name in ("adamw", "elastic"))
    assert islands == pytest.approx(plain, rel=0.03)
    found = [plans.records(store, made["elastic", 1], rank) for rank in range(2)]
    starts = [[one for one in records if one["kind"] == "start"] for records in found]
    assert [[one["start_step"] for one in of_one] for of_one in starts] == [[0], [0, KILLED_AFTER]]
    assert not starts[1][1]["resumed_from"], "healed by a peer, not by the store"
    for records in found:
        steps = [one["step"] for one in records if one["kind"] == "step"]
        assert steps == list(range(1, STEPS + 1)), "no step lost, none twice"


@pytest.mark.combines("dp_replicate", "update async")
@pytest.mark.combines("dp_shard", "update async")
def test_stale_islands_learn(trained) -> None:
    """A record has the loss of its own island."""
    made, store = trained
    plain = plans.losses(store, made["adamw", 1])
    for name in ("stale", "stale-hsdp"):
        assert plans.losses(store, made[name, 1]) == pytest.approx(plain, rel=0.05), name
    rounds = [one["rounds"] for one in plans.records(store, made["stale", 1]) if one["kind"] == "step"]
    assert rounds == [0, 0, 0, 0, 1, 1, 1, 3]  # heard two steps later, before a checkpoint, and at the end


def test_an_island_waits_for_none_that_is_near(trained, tmp_path) -> None:
    """Here one is as far ahead of the other as it may be, or neither would ever go on. And figures that are
    not finite are told as late, but no checkpoint has them that is due before."""
    made, store = trained
    apart, poisoned = (replace(made["stale", 1], run_id=name) for name in ("apart", "poisoned"))
    plans.run_together([apart, poisoned], tmp_path, worker="kit.apart", may_fail=True)
    assert plans.losses(store, apart) == plans.losses(store, made["stale", 1])
    said = (tmp_path / "output.log").read_text()
    assert "the loss is not finite" in said
    assert "on rank 1" in said
    assert not list((store / poisoned.stage_key).glob("checkpoints/*"))


@pytest.mark.parametrize("name", ["diloco", "stale", "hsdp"])
def test_a_resume_in_the_middle_of_a_round_repeats_it(trained, name: str) -> None:
    made, store = trained
    assert plans.losses(store, made[name, 2]) == plans.losses(store, made[name, 1])[STEPS // 2 :]


@pytest.mark.combines("resume under another mesh", "update diloco")
def test_others_go_on_with_it(trained) -> None:
    """Four islands with what two had in the middle of a round, two with what an elastic training's leader
    had; and islands with what one training had."""
    made, store = trained
    plain = plans.losses(store, made["adamw", 1])[STEPS // 2 :]
    for name in ("begun", "watched", "elastic"):
        assert plans.losses(store, made[name, 2]) == pytest.approx(plain, rel=0.03), name
