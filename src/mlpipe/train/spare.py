"""A machine without ranks: held in reserve, or at fault. It leaves when those with ranks have ended, as they
do, so that all of the gang end together, and the next start has it to choose from. No torch."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable

from mlpipe._core.errors import EXIT_CODES, StoreError
from mlpipe.plan.plan import Plan
from mlpipe.store.base import Store
from mlpipe.store.outcome import read_outcome

LOOK_SECONDS = 2.0
COME_SECONDS = 960.0  # for the others to meet; longer than they wait for each other
GONE_SECONDS = 600.0  # after they have left their meeting point, to say how they ended
STOPPED_SECONDS = 30.0  # the same, of what is told to stop: whoever restarts the gang waits for its last pod


def stand_by(store: Store, plan: Plan, rendezvous: str, stopped: Callable[[], bool]) -> int:
    """The exit code: of the first node's launcher; infrastructure where that has said nothing by its end."""
    print(f"no ranks here: others meet at {rendezvous}", flush=True)  # noqa: T201
    deadline = time.monotonic() + COME_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(StoreError):  # it is asked again
            outcome = read_outcome(store, f"{plan.attempt_key}/outcome.json")
            if outcome is not None:
                return outcome.exit_code
        if _listens(rendezvous):
            deadline = time.monotonic() + GONE_SECONDS
        elif stopped():
            deadline = min(deadline, time.monotonic() + STOPPED_SECONDS)
        time.sleep(LOOK_SECONDS)
    words = "were stopped" if stopped() else "are gone"
    print(f"those with ranks {words} and have not said how they ended", flush=True)  # noqa: T201
    return EXIT_CODES["cancelled" if stopped() else "infrastructure"]


def _listens(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    with contextlib.suppress(OSError):
        socket.create_connection((host, int(port)), timeout=LOOK_SECONDS).close()
        return True
    return False
