"""Signals that ask what is driven here to stop."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from mlpipe._core.errors import Interrupt

if TYPE_CHECKING:
    from mlpipe.submit.executor import StopRequest

_AT_ONCE_SECONDS = 10.0  # in which a process that stops at once ends what it began, and says so


@contextmanager
def heard(signals: Sequence[signal.Signals], stop: StopRequest) -> Iterator[None]:
    """Within, one of `signals` asks `stop` once; a second one interrupts. Whoever ends a process
    may repeat SIGTERM until it has ended: that does not interrupt what the second one began."""
    interrupted = -math.inf

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal interrupted
        if stop.kind is not None:
            if number == signal.SIGTERM and time.monotonic() - interrupted < _AT_ONCE_SECONDS:
                return
            interrupted = time.monotonic()
            raise Interrupt
        name = signal.Signals(number).name
        stop.request("interrupted" if number == signal.SIGINT else "cancelled", f"stopped by {name}")
        again = "Ctrl-C again" if number == signal.SIGINT else f"{name} again"
        # not print: the signal may have come in the middle of one
        with suppress(OSError):  # Ctrl-C has ended the `tee` that would hear it
            os.write(2, f"\nstopping: saving at the next step ({again}: at once)\n".encode())

    former = {}
    for number in signals:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup means what it says
            former[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, action in former.items():
            signal.signal(number, action)


@contextmanager
def finished_first() -> Iterator[None]:
    """Within, Ctrl-C interrupts only at the end; a second one at once."""
    came = False

    def handle(number: int, _: FrameType | None) -> None:
        nonlocal came
        if came:
            raise Interrupt
        came = True
        with suppress(OSError):
            os.write(2, b"\nleaving as soon as it is started (Ctrl-C again: at once)\n")

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield
        return
    former = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
    if came:
        raise Interrupt
