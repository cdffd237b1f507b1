"""When a coordinator that is told to end leaves its seat to another one."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from mlpipe.train import coordinate
from mlpipe.train.coordinate import Coordinating

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("commits", "seconds", "goes"),
    [
        ([((1, 5), []), ((1, 6), []), ((1, 7), [])], 30, True),
        ([((1, 5), []), ((1, 6), []), ((1, 7), [])], 3, False),  # short steps: signals may be on their way
        ([((1, 5), []), ((1, 6), [])], 30, False),  # others may have been told to end as well
        ([((1, 5), []), ((1, 5), []), ((1, 5), [])], 30, False),  # nothing counts in the meantime
        ([((1, 5), []), ((1, 6), [0]), ((2, 7), [1])], 30, False),  # all are leaving
        ([(None, []), ((1, 1), []), ((1, 2), []), ((1, 3), [])], 30, True),
    ],
)
def test_it_stays_until_it_is_clear_that_the_others_go_on(monkeypatch, commits, seconds, goes):
    """`commits`: quorum and step of the last one, and who left after it, at each look since the signal."""
    now = 100.0
    monkeypatch.setattr(coordinate, "time", SimpleNamespace(monotonic=lambda: now))
    one = object.__new__(Coordinating)
    one.heard, one.num_heard, one.num_signals, one.told_at = None, 0, 0, math.inf
    one._on_signal(15, None)
    now += seconds
    one._on_signal(15, None)
    for committed, left in commits:
        one.membership = SimpleNamespace(committed=committed, left=left)
        found = one._others_go_on()
    assert found == goes
