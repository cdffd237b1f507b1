"""The sample order is a permutation each epoch, and a function of the seed and the global index alone."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe.train.data.order import order

pytestmark = pytest.mark.unit

SEEDS = st.integers(0, 2**63 - 1)


def test_a_rank_that_begins_imports_no_masked_arrays():
    program = "import sys; from mlpipe.train.data.order import order; print(order(0, 1, 2, 2), *sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"{order(0, 1, 2, 2)} ")
    assert "numpy.ma" not in said.split()


def test_every_epoch_is_a_permutation():
    for n, epoch in product([*range(1, 300), 1023, 1024, 1025, 4096, 5000], (0, 1, 7)):
        assert np.array_equal(np.sort(order(3, epoch * n, n, n)), np.arange(n)), (n, epoch)


@settings(deadline=None)
@given(seed=SEEDS, n=st.integers(1, 10**12), start=st.integers(0, 10**13))
def test_any_position_of_a_huge_corpus_is_in_range_and_distinct(seed, n, start):
    indices = order(seed, start, 16, n)
    assert ((indices >= 0) & (indices < n)).all()
    for epoch in set((start + np.arange(16)) // n):
        inside = indices[(start + np.arange(16)) // n == epoch]
        assert len(set(inside.tolist())) == len(inside)


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, n=st.integers(1, 30), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_how_the_stream_is_cut_changes_nothing(seed, n, cuts):
    edges = sorted({0, 60, *cuts})
    parts = [order(seed, a, b - a, n) for a, b in pairwise(edges)]
    assert np.array_equal(np.concatenate(parts), order(seed, 0, 60, n))


def test_epochs_and_seeds_differ_and_neighbours_are_scattered():
    n = 10_000
    first = order(1, 0, n, n)
    assert (first == order(1, n, n, n)).mean() < 0.01
    assert (first == order(2, 0, n, n)).mean() < 0.01
    assert (first == np.arange(n)).mean() < 0.01
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 0.05


def test_small_epochs_reach_every_permutation():
    assert len({tuple(order(seed, 0, 4, 4)) for seed in range(2000)}) == 24


def test_the_order_never_changes_between_versions():
    """A run that is resumed under a newer mlpipe has to go on in the same order."""
    assert order(0, 0, 8, 1000).tolist() == GOLDEN_0
    assert order(1234567890123, 999_999, 4, 1_000_003).tolist() == GOLDEN_1


def test_no_samples_is_an_error():
    with pytest.raises(ValueError, match="no samples"):
        order(0, 0, 1, 0)


GOLDEN_0 = [215, 237, 468, 514, 226, 656, 318, 359]
GOLDEN_1 = [100372, 267638, 821569, 765598]
