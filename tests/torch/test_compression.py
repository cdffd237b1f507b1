"""Gradients that are sent in fewer bytes: what is not told now is told later, all ranks have the same bits,
and a training goes on with what it owes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import plans
from kit.thread_ranks import on_ranks
from torch import Tensor

from mlpipe._core.compression import BLOCK, CODES, COMPRESSIONS
from mlpipe.plan.updates import CompressPlan
from mlpipe.train.buckets import views
from mlpipe.train.parallel.compression.averager import Link, averager_maker, code_of, padded
from mlpipe.train.rank_rows import RankRows
from mlpipe.train.replicas.compressed import CompressedSums
from mlpipe.train.shards import LocalShard

pytestmark = pytest.mark.torch
SHAPES = ((40, 32), (7,), (3, 5, 40), ())
ARGUMENTS: dict[str, dict[str, float]] = {"powersgd": {"rank": 2}, "topk": {"ratio": 0.1}}


def said(rank: int, num_ranks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    size = sum(torch.Size(shape).numel() for shape in SHAPES)
    values = torch.randn(size, generator=generator) * 10 ** torch.randint(-3, 3, (size,), generator=generator)
    return torch.cat([values, torch.zeros(padded(size, num_ranks) - size)])


def averager_of(name: str) -> Any:
    return averager_maker(CompressPlan(name, ARGUMENTS.get(name, {})))([torch.empty(one) for one in SHAPES])


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("name", COMPRESSIONS)
def test_what_is_not_told_now_is_told_later(name: str, num_ranks: int) -> None:
    """Over several steps: means of all that was said = sum of the results + mean of what is left, and the
    results are the same bits on every rank."""

    def work(link: Link) -> tuple[list[Tensor], Tensor, int]:
        averager = averager_of(name)
        unsent = torch.zeros_like(said(0, num_ranks))
        results = []
        for step in range(3):
            unsent += said(link.ranks.rank, num_ranks, step)
            results.append(averager.mean(unsent, link))
        return results, unsent, link.sent_bytes

    found = on_ranks(num_ranks, work)
    whole = [said(rank, num_ranks, step).double() for rank in range(num_ranks) for step in range(3)]
    expected = torch.stack(whole).sum(0) / num_ranks
    left = torch.stack([unsent.double() for _, unsent, _ in found]).mean(0)
    told = torch.stack([result.double() for result in found[0][0]]).sum(0)
    torch.testing.assert_close(told + left, expected, rtol=1e-4, atol=1e-2)
    for results, _, _ in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0][0], strict=True))
    plain = 3 * 2 * 4 * expected.numel() * (num_ranks - 1) / num_ranks
    assert found[0][2] < plain / 1.9


@pytest.mark.parametrize("name", ["int8", "topk"])
def test_what_replicas_do_not_tell_now_they_tell_later_whoever_comes(name: str) -> None:
    """Two, then three; what is summed for a step that is not committed leaves nothing behind. The first sum
    is what a gang of two averages, to the bit."""
    shapes = [torch.empty(one) for one in SHAPES]
    sums = [CompressedSums(CompressPlan(name, ARGUMENTS.get(name, {}))) for _ in range(3)]
    size = sum(tensor.numel() for tensor in shapes)

    def step(number: int, num_ranks: int, commits: bool = True) -> list[Tensor]:
        def work(link: Link) -> Tensor:
            gradients = views(said(link.ranks.rank, num_ranks, number)[:size].clone(), shapes)
            sums[link.ranks.rank].sum_(gradients, link)
            if commits:
                sums[link.ranks.rank].commit()
            return torch.cat([one.reshape(-1) for one in gradients])

        results: list[Tensor] = on_ranks(num_ranks, work)
        assert all(torch.equal(one, results[0]) for one in results)
        return results

    def of_a_gang(link: Link) -> Tensor:
        result: Tensor = averager_of(name).mean(said(link.ranks.rank, 2), link)
        return result[:size] * 2

    told = step(0, 2)[0]
    assert torch.equal(told, on_ranks(2, of_a_gang)[0])
    step(1, 2, commits=False)
    for number in (2, 3):
        told = told + step(number, 3)[0]
    steps = [(0, 2), (2, 3), (3, 3)]
    expected = sum(said(rank, many, n)[:size].double() for n, many in steps for rank in range(many))
    left = sum(torch.cat(one._unsent).double() for one in sums)
    torch.testing.assert_close(told + left, expected, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("name", COMPRESSIONS)
def test_what_is_not_finite_on_one_rank_is_not_on_all(name: str) -> None:
    for bad in (torch.nan, torch.inf):

        def work(link: Link, bad: float = bad) -> Tensor:
            unsent = said(link.ranks.rank, 2)
            if link.ranks.rank == 1:
                unsent[3] = bad
            result: Tensor = averager_of(name).mean(unsent, link)
            return result

        assert not any(bool(result.isfinite().all()) for result in on_ranks(2, work))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(CODES), st.integers(0, 10**6), st.floats(-30, 30))
def test_a_code_is_within_half_a_unit(name: str, seed: int, power: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(2, 2 * BLOCK, generator=generator) * 10.0**power
    rows[1, :BLOCK] = 0
    code = code_of(name)
    error = (code.decode(code.encode(rows), 2 * BLOCK) - rows).abs()
    largest = rows.abs().view(2, 2, BLOCK).amax(2, keepdim=True)
    unit = {"int8": largest / 127, "int4": largest / 7}.get(name, rows.abs().view(2, 2, BLOCK) / 2**7)
    least = rows.abs().amax() / 2**24  # of fp16's small numbers
    assert bool((error.view(2, 2, BLOCK) <= 0.501 * unit + least).all())


def test_fp16_keeps_what_it_can_represent() -> None:
    code = code_of("fp16")
    rows = torch.randint(-2047, 2048, (1, BLOCK)).float() * 2.0**40
    assert torch.equal(code.decode(code.encode(rows), BLOCK), rows)


def test_another_number_of_ranks_owes_the_same() -> None:
    """Three ranks go on with what two had."""
    rows = torch.randn(2, 4, 3)
    left = []
    for rank in range(3):
        own = RankRows(rank, 3)
        tensor = torch.ones(4, 3)
        own.begin_load(2)
        (asked,) = own.row(LocalShard("optim.a.unsent", tensor, (4, 3), (0, 0)))
        assert (asked.shape, asked.offset) == ((2, 4, 3), (0, 0, 0))
        asked.local.copy_(rows)
        own.after_load()
        left.append(tensor)
        (saved,) = own.row(LocalShard("optim.a.unsent", tensor, (4, 3), (0, 0)))
        assert (saved.shape, saved.offset) == ((3, 4, 3), (rank, 0, 0))
    torch.testing.assert_close(torch.stack(left).mean(0), rows.mean(0))


# -- whole trainings --------------------------------------------------------------------------------

STEPS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Plans by name, and their store: of 2 ranks, and one that goes on with 4."""
    folder = tmp_path_factory.mktemp("compressed")
    tokens, store = plans.write_tokens(folder / "tokens"), folder / "store"

    def plan_of(run_id: str, name: str | None = None, *, steps: int = STEPS, **changes: Any) -> Any:
        compress = None if name is None else CompressPlan(name, ARGUMENTS.get(name, {}))
        changes = {"every": STEPS // 2, "compress": compress, **changes}
        return plans.train_plan(store, tokens, steps=steps, run_id=run_id, **changes)

    made = [plan_of("ddp"), plan_of("zero1", "int8", strategy="zero1")]
    made += [plan_of(name, name) for name in COMPRESSIONS]
    made.append(plan_of("accumulated", "int8", micro_batch=4, accumulation=2))
    for name in ("int4", "powersgd"):
        made.append(plan_of(f"{name}-again", name, steps=STEPS // 2))
        made.append(plan_of(f"{name}-again", name, attempt=2))
    made.append(plan_of("begun", steps=STEPS // 2))
    made.append(plan_of("begun", "int4", attempt=2))
    made.append(plan_of("turned", "int8", steps=STEPS // 2))
    turns = CompressPlan("powersgd", {"rank": 4}), CompressPlan("powersgd", {"rank": 2})
    made += [
        plan_of("turned", steps=STEPS // 2 + turn, attempt=1 + turn, compress=to)
        for turn, to in enumerate(turns, start=1)
    ]
    made.append(plan_of("grown", "int4", steps=STEPS // 2))
    plans.run_together(made, folder / "two")
    more = [plan_of("grown", "int4", attempt=2, world_size=4)]
    plans.run_together(more, folder / "four")
    return {(plan.run_id, plan.attempt): plan for plan in made + more}, store


@pytest.mark.combines("dp_replicate", "compress *")
@pytest.mark.combines("strategy zero1", "compress int8")
@pytest.mark.combines("accumulation", "compress int8")
def test_a_compressed_training_learns_the_same(trained) -> None:
    made, store = trained
    plain = plans.losses(store, made["ddp", 1])
    for name, within in {"fp16": 1e-4, "bf16": 1e-3, "int8": 3e-3, "int4": 2e-2}.items():
        losses = plans.losses(store, made[name, 1])
        assert losses == pytest.approx(plain, rel=within), name
        assert losses != plain, name
    for name in ("powersgd", "topk"):
        losses = plans.losses(store, made[name, 1])
        assert losses[0] == pytest.approx(plain[0])
        assert losses[-1] < losses[0] - 0.3 * (plain[0] - plain[-1]), name
    assert plans.losses(store, made["zero1", 1]) == pytest.approx(
        plans.losses(store, made["int8", 1]), rel=1e-5
    )
    assert plans.losses(store, made["accumulated", 1]) == pytest.approx(plain, rel=3e-3)


def test_records_tell_what_was_sent(trained) -> None:
    made, store = trained
    for name, least in {"fp16": 1.9, "int8": 3.8, "int4": 7.5, "powersgd": 9, "topk": 6}.items():
        sent = plans.by_step(store, made[name, 1], "exchanged_bytes")
        plain = plans.by_step(store, made[name, 1], "exchanged_plain_bytes")
        assert min(p / s for p, s in zip(plain, sent, strict=True)) > least, name
    assert "exchanged_bytes" not in plans.records(store, made["ddp", 1])[-2]


@pytest.mark.parametrize("name", ["int4", "powersgd"])
def test_a_resumed_training_owes_what_it_owed(trained, name: str) -> None:
    made, store = trained
    whole = plans.losses(store, made[name, 1])
    assert plans.losses(store, made[f"{name}-again", 2]) == whole[STEPS // 2 :]


@pytest.mark.combines("resume under another mesh", "compress int4")
def test_others_go_on_with_it(trained) -> None:
    """From a training that was not compressed; and of another number of ranks."""
    made, store = trained
    plain = plans.losses(store, made["ddp", 1])[STEPS // 2 :]
    for run in ("begun", "grown"):
        assert plans.losses(store, made[run, 2]) == pytest.approx(plain, rel=2e-2), run


def test_the_method_may_change_at_a_resume(trained) -> None:
    """To one that keeps tensors of its own, and to one whose tensors have other shapes."""
    made, store = trained
    for turn in (1, 2):
        (loss,) = plans.losses(store, made["turned", 1 + turn])
        assert loss == pytest.approx(plans.losses(store, made["ddp", 1])[STEPS // 2 + turn - 1], rel=2e-2)
