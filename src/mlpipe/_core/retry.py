"""When a request is sent again, and when it is given up: the one policy of all that speak to a server.

A try that failed in passing raises AwayError. The next one waits twice as long as the one before, up to a
limit, and less by chance, so that a thousand pods whose store comes back do not ask in one instant
(M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015). All tries have one deadline.

What was certainly not done (`applied` False) may be sent again; of what may have been done, only that which
does no harm if it is done twice, and its caller must be able to tell (`ambiguous`).
"""

from __future__ import annotations

import random
import time

FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 5.0  # but a server that asks for more time gets it


class AwayError(Exception):
    """The server was away or busy, or its answer was lost. `applied`: the request may have taken effect.
    `retry_after_seconds`: how long the server asks to be left alone."""

    def __init__(self, message: str, *, applied: bool, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.applied = applied
        self.retry_after_seconds = retry_after_seconds


class Tries:
    """Of one request. `ambiguous`: one of those that failed may have taken effect."""

    def __init__(
        self,
        seconds: float,
        *,
        first_pause_seconds: float = FIRST_PAUSE_SECONDS,
        max_pause_seconds: float = MAX_PAUSE_SECONDS,
    ) -> None:
        """`seconds`: until the deadline of all tries together."""
        self.seconds = seconds
        self.deadline = time.monotonic() + seconds
        self.num_failed = 0
        self.ambiguous = False
        self._pause_seconds, self._max_pause_seconds = first_pause_seconds, max_pause_seconds

    def again(self, error: AwayError) -> bool:
        """Pauses after a try that failed; False, at once, where the pause would outlast the deadline."""
        self.num_failed += 1
        self.ambiguous = self.ambiguous or error.applied
        pause, left = random.uniform(0.5, 1.0) * self._pause_seconds, self.deadline - time.monotonic()
        if pause >= left:
            return False
        time.sleep(min(max(pause, error.retry_after_seconds), left))
        self._pause_seconds = min(2 * self._pause_seconds, self._max_pause_seconds)
        return True

    def __str__(self) -> str:
        """For a message: "within 90 s (3 tries)"."""
        tries = "1 try" if self.num_failed == 1 else f"{self.num_failed} tries"
        return f"within {self.seconds:.0f} s ({tries})"
