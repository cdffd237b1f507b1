"""What each change of an elastic training's nodes cost."""

from __future__ import annotations

import pytest

from mlpipe._core.records import Membership, Step
from mlpipe.observe.members import costs, in_words

pytestmark = pytest.mark.unit


def step(number, cost=None):
    zeros = dict.fromkeys(("data_seconds", "compute_seconds", "collective_seconds"), 0.0)
    return Step(
        step=number, loss=1.0, grad_norm=1.0, tokens=1, target_tokens=1, seconds=1.0, memory_bytes=0, **zeros,
        membership_seconds=cost,
    )  # fmt: skip


def test_a_change_costs_what_the_first_step_after_it_tells():
    """Two changes before the same step: the last of them has it. One that no step came after costs nothing
    that is known."""
    changes = [
        Membership(members=[0, 1], step=0, why="the training begins"),
        Membership(members=[0], step=10, why="replica 1 was lost"),
        Membership(members=[0, 1], step=10, why="replica 1 comes"),
        Membership(members=[0], step=30, why="replica 1 was lost"),
    ]
    steps = [step(1), step(10), step(11, 2.5), step(12), step(30)]
    assert costs(changes, steps) == [None, None, 2.5, None]
    assert in_words(changes[-1]) == "1 node takes part (0) since step 30: replica 1 was lost"
