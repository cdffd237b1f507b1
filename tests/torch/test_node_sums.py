"""Numbers of a step are summed over the ranks of a node: the same bits on all, whoever is late. Trainings of
several ranks on one node do so (`test_strategies.py`); here ranks are threads, and their memory their own."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlpipe.train import node_sums
from mlpipe.train.node_sums import NodeSums

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Threads share an interpreter: who waits lets it go."""
    monkeypatch.setattr(node_sums, "_YIELDS", 0)


def sums_of(num_ranks: int, pids: list[int] | None = None) -> list[NodeSums]:
    memory = mmap.mmap(-1, 2 * num_ranks * node_sums._SLOT_BYTES)
    made = [object.__new__(NodeSums) for _ in range(num_ranks)]
    for rank, one in enumerate(made):
        one._rank, one._num_ranks, one._number = rank, num_ranks, 0
        one._pids = pids or [os.getpid()] * num_ranks
        one._memory = memory
    return made


@settings(max_examples=20)
@given(st.lists(st.lists(st.floats(width=64), min_size=3, max_size=3), min_size=1, max_size=20))
def test_all_ranks_have_the_same_bits_of_every_sum(steps):
    """Each in its time; infinite values and NaN, too."""
    found: dict[int, list[bytes]] = {}
    made = sums_of(3)

    def work(rank: int) -> None:
        draw = random.Random(rank)
        told = []
        for numbers in steps:
            if draw.random() < 0.3:
                time.sleep(0.001)
            values = torch.tensor([numbers[rank], 1.0], dtype=torch.float64)
            made[rank].sum_(values)
            told.append(values.numpy().tobytes())
        found[rank] = told

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    expected = [torch.tensor([(a + b) + c, 3.0], dtype=torch.float64) for a, b, c in steps]
    for rank in range(3):
        got = [torch.frombuffer(bytearray(one), dtype=torch.float64) for one in found[rank]]
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_one_that_has_ended_is_not_waited_for():
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    process.wait(60)
    one, _ = sums_of(2, [os.getpid(), process.pid])
    with pytest.raises(RuntimeError, match="Connection closed by peer: rank 1 has ended"):
        one.sum_(torch.ones(6, dtype=torch.float64))
