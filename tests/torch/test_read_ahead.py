"""Samples that are read while the step before still computes are those that would be read after it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from mlpipe.plan.mesh import Mesh
from mlpipe.train.data.loader import MicrobatchLoader, ReadAhead
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.seeding import seed_step
from mlpipe.train.world import World

pytestmark = pytest.mark.torch


class Noisy:
    """Augments: each look at a sample draws anew."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": index + torch.rand(3)}


def reader(rank: int = 0) -> ReadAhead:
    world = World(Mesh(dp_replicate=2), rank, torch.device("cpu"))
    return ReadAhead(MicrobatchLoader(Noisy(), world, seed=1, global_batch=4, micro_batch=1, seq_len=3))


def together(batches: list[Microbatch]) -> torch.Tensor:
    return torch.cat([one.batch["inputs"] for one in batches])


def test_a_resumed_run_draws_what_the_first_drew():
    first = reader()
    one = together(first.take(1, 0))
    torch.rand(5)  # dropout
    assert first.read(2, 4) > 0  # a CPU does nothing meanwhile
    torch.rand(7)
    two = together(first.take(2, 4))
    assert torch.equal(two, together(reader().take(2, 4)))
    assert not torch.equal(one % 1, two % 1)
    assert not torch.equal(one, together(reader(rank=1).take(1, 0)))


def test_each_seed_step_and_rank_draws_its_own():
    drawn = set()
    for seed, step, rank in itertools.product(range(2), range(3), range(2)):
        for _ in range(2):  # a function of these three
            seed_step(seed, step, rank)
            drawn.add((torch.rand(1).item(), random.random(), np.random.rand()))
    for column in zip(*drawn, strict=True):
        assert len(set(column)) == 2 * 3 * 2


def test_samples_are_given_once():
    ahead = reader()
    ahead.read(1, 0)
    first = together(ahead.take(1, 0))
    assert not torch.equal(first, together(ahead.take(2, 4)))
