"""The one policy of what is sent again: pauses, the deadline, what may have been done. No clock runs here."""

from __future__ import annotations

import pytest
from kit.clock import Clock, of_retries

from mlpipe._core import retry
from mlpipe._core.retry import AwayError, Tries

pytestmark = pytest.mark.unit


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = of_retries(monkeypatch)
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: (low + 3 * high) / 4)  # 0.875
    return found


def away(*, applied: bool = False, retry_after_seconds: float = 0.0) -> AwayError:
    return AwayError("away", applied=applied, retry_after_seconds=retry_after_seconds)


def test_pauses_double_up_to_a_limit_and_end_at_the_deadline(clock: Clock) -> None:
    tries = Tries(3.5, first_pause_seconds=0.4, max_pause_seconds=1.0)
    while tries.again(away()):
        assert clock.now < 1003.5
    assert clock.pauses == pytest.approx([0.35, 0.7, 0.875, 0.875])  # another would end after it
    assert str(tries) == "within 4 s (5 tries)"


def test_a_server_gets_the_time_that_it_asks_for_but_no_more_than_there_is(clock: Clock) -> None:
    tries = Tries(10.0)
    assert tries.again(away(retry_after_seconds=7.0))
    assert tries.again(away(retry_after_seconds=7.0))
    assert not tries.again(away(retry_after_seconds=7.0))
    assert clock.pauses == [7.0, 3.0]


def test_what_may_have_been_done_is_remembered(clock: Clock) -> None:
    tries = Tries(10.0)
    tries.again(away())
    assert (tries.ambiguous, str(tries)) == (False, "within 10 s (1 try)")
    tries.again(away(applied=True))
    tries.again(away())
    assert (tries.ambiguous, tries.num_failed) == (True, 3)


def test_chance_takes_up_to_half_of_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    for _ in range(200):
        Tries(10.0, first_pause_seconds=1.0).again(away())
    assert 0.5 <= min(clock.pauses) < 0.6
    assert 0.9 < max(clock.pauses) <= 1.0
