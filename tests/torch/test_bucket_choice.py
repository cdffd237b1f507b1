"""How many gradients travel together: any size gives the same training, all ranks take the same one, and a
resume keeps it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kit import plans

from mlpipe.train.bucket_choice import DEFAULT, fastest, sizes_to_try
from mlpipe.train.parallel import replicate
from mlpipe.train.parallel.parallelized_model import ParallelizedModel

pytestmark = pytest.mark.torch
STEPS = 6
MIB = 2**20


def rounds(least: float, most: float) -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(least, most), min_size=2, max_size=3)


# mostly faster ones, or hardly any would be taken
@given(st.dictionaries(st.sampled_from(["1", "4", "16"]), rounds(0.001, 2), min_size=1), rounds(1, 100))
def test_what_is_taken_was_never_slower_than_ddps_own(others: dict[str, list[float]], default: Any) -> None:
    chosen = fastest({DEFAULT: default, **others})
    if chosen != DEFAULT:
        assert len(others[chosen]) == len(default) == 3
        assert max(others[chosen]) < min(default)


def test_the_fastest_is_taken_where_it_is_faster_each_time() -> None:
    slow, fast = [1.0, 1.1, 1.2], [0.5, 0.6, 0.7]
    assert fastest({DEFAULT: slow, "4": fast, "1": [0.6, 0.7, 0.8]}) == "4"
    assert fastest({DEFAULT: slow, "4": [0.5, 0.6, 1.01]}) == DEFAULT  # once it was not
    assert fastest({DEFAULT: slow, "4": [0.5]}) == DEFAULT  # a link too slow to look again
    assert fastest({DEFAULT: [0.5]}) == DEFAULT


def test_sizes_make_buckets_that_differ() -> None:
    assert sizes_to_try(200 * 2**10) == []
    assert sizes_to_try(MIB) == [256 * 2**10]
    assert sorted(sizes_to_try(10 * MIB)) == [256 * 2**10, MIB, 4 * MIB, 10 * MIB]


def test_buckets_are_of_the_size_that_was_set_last_and_gradients_stay_the_same() -> None:
    """In a group of one: how many messages a backward pass sends."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(8)))
        model = ParallelizedModel(cast(Any, None), module)
        world: Any = SimpleNamespace(group=lambda axis: None)
        replicate.apply(model, world, cast(Any, SimpleNamespace(buckets=None)))
        assert model.set_buckets is not None
        inputs = torch.randn(4, 256)
        found = []
        for size in (None, 512 * 2**10, MIB, None):
            model.set_buckets(size)
            for _ in range(2):
                module.zero_grad(set_to_none=True)
                model.module(inputs).sum().backward()
            buckets = model.module.reducer._get_zeros_like_grad_buckets()
            found.append((len(buckets), [p.grad.clone() for p in module.parameters()]))
    finally:
        dist.destroy_process_group()
    assert [number for number, _ in found] == [2, 4, 2, 2]
    for _, gradients in found:
        assert all(torch.equal(a, b) for a, b in zip(gradients, found[0][1], strict=True))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("buckets")
    tokens, store = plans.write_tokens(folder / "tokens"), folder / "store"

    def plan_of(run_id: str, *, steps: int = STEPS, **changes: Any) -> Any:
        changes = {"every": STEPS // 2, "deterministic": False, **changes}
        return plans.train_plan(store, tokens, steps=steps, run_id=run_id, **changes)

    made = [
        plan_of("default"),
        plan_of("small", buckets=2**16),
        plan_of("auto", buckets="auto", steps=STEPS // 2),
        plan_of("auto", buckets="auto", attempt=2),
        plan_of("zero1", buckets="auto", strategy="zero1"),
        plan_of("sharded", buckets="auto", strategy="fsdp"),
    ]
    plans.run_together(made, folder / "two")
    more = [plan_of("auto", buckets="auto", attempt=3, steps=STEPS + 2, world_size=4)]
    plans.run_together(more, folder / "four")
    return {(plan.run_id, plan.attempt): plan for plan in made + more}, store


def start(store: Any, plan: Any, rank: int = 0) -> dict[str, Any]:
    return next(one for one in plans.records(store, plan, rank) if one["kind"] == "start")


@pytest.mark.combines("dp_replicate", "buckets auto")
@pytest.mark.combines("strategy zero1", "buckets auto")
def test_any_size_gives_the_same_losses(trained) -> None:
    made, store = trained
    expected = plans.losses(store, made["default", 1])
    assert plans.losses(store, made["small", 1]) == pytest.approx(expected, rel=1e-6)
    halves = plans.losses(store, made["auto", 1]) + plans.losses(store, made["auto", 2])
    assert halves == pytest.approx(expected, rel=1e-6)
    assert plans.losses(store, made["zero1", 1]) == pytest.approx(expected, rel=1e-6)
    assert start(store, made["default", 1]).get("bucket_bytes") is None
    assert start(store, made["small", 1])["bucket_bytes"] == 2**16


def test_all_ranks_take_the_same_size_and_a_resume_keeps_it(trained) -> None:
    made, store = trained
    starts = [start(store, made["auto", attempt], rank) for attempt in (1, 2) for rank in (0, 1)]
    said = [{key: one.get(key) for key in ("bucket_bytes", "bucket_seconds")} for one in starts]
    assert said[1:] == said[:-1]  # the seconds as well: nobody measured again
    assert said[0]["bucket_seconds"].keys() == {"default", str(256 * 2**10)}
    other = start(store, made["auto", 3])["bucket_seconds"]
    assert other.keys() == said[0]["bucket_seconds"].keys()
    assert other != said[0]["bucket_seconds"]  # other ranks measure for themselves


def test_a_model_without_buckets_measures_nothing(trained) -> None:
    made, store = trained
    assert start(store, made["sharded", 1]).get("bucket_seconds") is None
