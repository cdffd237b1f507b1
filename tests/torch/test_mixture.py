"""Several data sets as one: shares, orders, and one number for the position."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import own_data, plans

from mlpipe._core.errors import TrainError
from mlpipe.plan.data import DataPlan, SourcePlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.train.data.datasets import open_dataset
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.data.microbatch import collate
from mlpipe.train.data.mixture import Mixture, Shortened, shares
from mlpipe.train.data.order import order, order_at
from mlpipe.train.world import World

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([3.0, 1.0], [3, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.5], [1]),
        ([2.0, 4.0, 6.0], [1, 2, 3]),
        ([1e6, 0.001], [10**9, 1]),
        ([1e6, 0.999983, 0.999979], [2147479353, 2147, 2147]),
    ],
)
def test_weights_are_shares_in_whole_numbers(weights, expected):
    assert shares(weights) == expected


def mixture(lengths: list[int], weights: list[float]) -> Mixture:
    sources = [own_data.Numbers(length, 1000 * number) for number, length in enumerate(lengths)]
    return Mixture(sources, weights)


def ordered(mixed: Mixture, seed: int, start: int, count: int) -> np.ndarray:
    return mixed.order_at(seed, np.arange(start, start + count))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    weights=st.lists(st.integers(1, 5), min_size=3, max_size=3),
    seed=st.integers(0, 3),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_each_source_has_its_share_and_goes_through_its_own_samples(lengths, weights, seed, cuts):
    """In every block of positions exactly; each of its samples once an epoch; wherever a step is cut off."""
    weights = weights[: len(lengths)]
    mixed = mixture(lengths, [float(weight) for weight in weights])
    found = np.concatenate(
        [
            ordered(mixed, seed, start, count)
            for start, count in zip(np.cumsum([0, *cuts]), cuts, strict=False)
        ]
    )
    assert found.tolist() == ordered(mixed, seed, 0, sum(cuts)).tolist()
    places = [mixed.place_of(int(index)) for index in found]
    parts = shares([float(weight) for weight in weights])
    for first in range(0, len(places) - sum(parts) + 1, sum(parts)):
        block = Counter(source for source, _ in places[first : first + sum(parts)])
        assert [block[number] for number in range(len(parts))] == parts
    for number, length in enumerate(lengths):
        own = [i for source, i in places if source == number]
        whole = len(own) // parts[number] * parts[number]  # within a block the places are mixed
        for epoch in range(whole // length - 1):
            # a block that spans two epochs may hand some of the second one's first
            assert set(own[: (epoch + 2) * length + parts[number]]) == set(range(length))
        assert max(Counter(own).values(), default=0) <= len(own) // length + 1 + parts[number] // length + 1


@pytest.mark.parametrize("weights", [[734211, 89123], [0.123457, 0.7, 0.176543], [1e6, 333333.331, 0.999983]])
def test_fine_weights_mix_no_more_than_1024_positions(weights):
    """Of any so many each source has its share to within a few samples, and its own samples in a row."""
    mixed = mixture([5_000] * len(weights), weights)
    for stop in (1_024, 3 * 1_024):
        _, own = chosen = mixed._sources_at(7, np.arange(stop))
        assert len(set(zip(*map(np.ndarray.tolist, chosen), strict=True))) == stop
        for number, weight in enumerate(weights):
            mine = own[chosen[0] == number]
            assert sorted(mine.tolist()) == list(range(len(mine)))
            assert abs(len(mine) - stop * weight / sum(weights)) < len(weights)
    first = mixed._sources_at(7, np.arange(200))[0]
    assert 0.3 < (first == 0).mean() * sum(weights) / weights[0] < 1.7
    far = mixed._sources_at(7, 10**12 + np.arange(4_096))
    assert far[0].min() >= 0
    assert far[1].min() >= 0


def test_where_less_than_a_block_is_mixed_the_shares_come_out_even(monkeypatch):
    """After a whole number of blocks, and of what is mixed."""
    monkeypatch.setattr("mlpipe.train.data.mixture._MIXED", 8)
    chosen, own = mixture([9, 9, 9], [11, 6, 4])._sources_at(7, np.arange(21 * 8))
    for number, share in enumerate([11, 6, 4]):
        assert sorted(own[chosen == number].tolist()) == list(range(share * 8))


def test_a_source_is_read_in_its_own_order():
    """That of order.py for positions of its own, which no other source and no share changes."""
    alone, beside = mixture([50, 7], [1, 1]), mixture([50, 30, 4], [2, 1, 5])

    def firsts(mixed: Mixture, count: int) -> list[int]:
        return sorted(i for s, i in map(mixed.place_of, ordered(mixed, 4, 0, count).tolist()) if s == 0)

    assert firsts(alone, 40) == firsts(beside, 80)
    assert len(set(firsts(alone, 40))) == 20
    assert ordered(mixture([50], [1]), 4, 3, 9).tolist() != order(4, 3, 9, 50).tolist()  # seeds of their own
    assert order_at(4, np.arange(3, 130), 50).tolist() == order(4, 3, 127, 50).tolist()


def test_for_validation_it_is_read_once_as_far_as_the_shares_go():
    short = Shortened(mixture([100, 10], [3.0, 1.0]))
    assert len(short) == 40
    indices = [short[i]["index"].item() for i in range(len(short))]
    assert sorted(indices) == [*range(30), *range(1000, 1010)]
    assert 2 <= sum(index >= 1000 for index in indices[:20]) <= 8
    with pytest.raises(IndexError):
        short[40]


def source(weight: float, size: int, base: int) -> SourcePlan:
    return SourcePlan(weight, None, Entry("kit.own_data:numbers", {"size": size, "base": base}), None)


def test_tokens_and_samples_of_ones_own_lie_in_one_batch(tmp_path):
    tokens = plans.write_tokens(tmp_path / "tokens", num_tokens=2_000)
    own = SourcePlan(1.0, None, Entry("kit.models:numbers", {}), None)
    data = DataPlan(None, None, None, mix=(SourcePlan(3.0, str(tokens), None, None), own))
    dataset = open_dataset(data, split="train", seq_len=32)
    world = World(Mesh(), 0, torch.device("cpu"))
    loader = MicrobatchLoader(dataset, world, seed=1, global_batch=8, micro_batch=8, seq_len=32)
    (batch,) = loader.step(0)
    assert {name: tuple(t.shape) for name, t in batch.batch.items()} == {
        "inputs": (8, 32),
        "targets": (8, 32),
    }
    assert batch.num_tokens == 8 * 32
    assert len(open_dataset(data, split="validation", seq_len=32)) > 3
    with pytest.raises(TrainError, match="sources 0 and 1 cannot lie in one batch") as caught:
        open_dataset(data._replace(mix=(data.mix[0], source(1, 5, 0))), split="train", seq_len=32)
    assert (caught.value.where, caught.value.kind) == ("data.mix", "input")
    both = data._replace(mix=(source(1, 5, 0), source(1, 5, 100)))
    assert set(collate(open_dataset(both, split="train", seq_len=1), np.array([0, 7]))["index"].tolist()) == {
        0,
        102,
    }


def test_a_mixture_is_resumed_at_its_sample_on_any_number_of_ranks():
    data = DataPlan(None, None, None, mix=(source(2, 9, 0), source(1, 5, 100)))
    dataset = open_dataset(data, split="train", seq_len=1)

    def taken(position: int, ranks: int) -> list[int]:
        found: list[int] = []
        for rank in range(ranks):
            world = World(Mesh(dp_replicate=ranks), rank, torch.device("cpu"))
            loader = MicrobatchLoader(dataset, world, seed=3, global_batch=6, micro_batch=2, seq_len=1)
            for one in loader.step(position):
                found += one.batch["index"].tolist() if one.counts else []
        return found

    steps = [taken(6 * step, 1) for step in range(10)]
    assert [taken(6 * step, 1 + step % 4) for step in range(10)] == steps
