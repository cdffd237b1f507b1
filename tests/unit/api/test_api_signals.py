"""What a process does that is told to stop more than once."""

from __future__ import annotations

import signal

import pytest

from mlpipe._core.errors import Interrupt
from mlpipe.api.signals import heard
from mlpipe.submit.executor import StopRequest

pytestmark = pytest.mark.unit


def test_a_sigterm_that_is_repeated_does_not_interrupt_what_ends_at_once():
    """A person who presses Ctrl-C again does."""
    stop = StopRequest()
    with heard((signal.SIGTERM, signal.SIGINT), stop):
        signal.raise_signal(signal.SIGTERM)
        assert stop.kind == "cancelled"
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupt):
            signal.raise_signal(signal.SIGINT)
