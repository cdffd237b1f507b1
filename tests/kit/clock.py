"""Time that passes only where somebody sleeps: a deadline is so many pauses, on any machine."""

from __future__ import annotations

import time

import pytest

from mlpipe._core import retry


class Clock:
    """Stands where a module has `time`. Each sleep is over at once, and noted in `pauses`."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    def time(self) -> float:
        """Likewise, since 1970."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Lets other threads go on, no more."""
        self.now += seconds
        self.pauses.append(seconds)
        time.sleep(0.001)


def of_retries(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of what is sent again to a server."""
    clock = Clock()
    monkeypatch.setattr(retry, "time", clock)
    return clock
