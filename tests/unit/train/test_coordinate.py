"""When a coordinator that is told to end leaves its seat to another one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mlpipe.train.coordinate import Coordinating

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("commits", "goes"),
    [
        ([((1, 5), []), ((1, 6), []), ((1, 7), [])], True),
        ([((1, 5), []), ((1, 6), [])], False),  # others may have been told to end as well
        ([((1, 5), []), ((1, 5), []), ((1, 5), [])], False),  # nothing counts in the meantime
        ([((1, 5), []), ((1, 6), [0]), ((2, 7), [1])], False),  # all are leaving
        ([(None, []), ((1, 1), []), ((1, 2), []), ((1, 3), [])], True),
    ],
)
def test_it_stays_until_it_is_clear_that_the_others_go_on(commits, goes):
    """`commits`: quorum and step of the last one, and who left after it, at each look since the signal."""
    one = object.__new__(Coordinating)
    one.heard, one.num_heard = None, 0
    for committed, left in commits:
        one.membership = SimpleNamespace(committed=committed, left=left)
        found = one._others_go_on()
    assert found == goes
