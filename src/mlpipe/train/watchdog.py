"""Ends a run that hangs: no heartbeat for so long, and the stacks of all threads of all ranks are kept."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from mlpipe.train import outcome

_POLL_SECONDS = 0.5
# After the first rank noticed, the others get this long to write their stacks too.
_GRACE_SECONDS = 2.0
# Before the first step: a busy machine imports torch, and a big checkpoint loads, for longer than a step.
STARTING_SECONDS = 600.0
# When all is done and said: what other packages still do as the process ends (their atexit hooks).
_LEAVING_SECONDS = 30.0
EXIT_CODE = 75


class Watchdog:
    """`beat` says that something moved, and where the loop is; `waiting`: for other ranks or the device.
    `in_collective` answers the same between beats. A rank that sees another rank's hang writes its own stacks
    and what it does, so that the one rank that never entered the collective shows: of those with a word the
    one that does not wait is to blame. A rank that has none is the launcher's to name."""

    def __init__(self, scratch: Path, *, rank: int, timeout_seconds: float) -> None:
        self._scratch = scratch
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._last = time.monotonic()
        self._doing = "starting"
        self._step = 0
        self._waiting = False
        self._exit_code: int | None = None
        self.in_collective: Callable[[], bool] = lambda: False
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, step: int, *, waiting: bool = False) -> None:
        self._doing = doing
        self._waiting = waiting
        self._step = step
        self._last = time.monotonic()

    def still(self) -> None:
        """What the last beat said goes on, and somebody else sees to it that it ends."""
        self._last = time.monotonic()

    def leaving(self, exit_code: int) -> None:
        """How the work ended is written, and nothing changes it any more: a process that does not end within
        a while is ended with `exit_code`."""
        self._last = time.monotonic()
        self._exit_code = exit_code

    def _watch(self) -> None:
        stacks = self._scratch / f"stacks-rank-{self._rank}.txt"
        while True:
            time.sleep(_POLL_SECONDS)
            silent = time.monotonic() - self._last
            if self._exit_code is not None:
                if silent > _LEAVING_SECONDS:
                    os._exit(self._exit_code)
                continue
            patience = self._timeout_seconds
            if self._step == 0:
                patience = max(patience, STARTING_SECONDS)
            fatal = outcome.fatal_files(self._scratch)
            if silent > patience or fatal:
                _write_stacks(stacks)
                if not fatal or outcome.any_hang(self._scratch):
                    outcome.write(self._scratch, self._hang(silent), fatal=True)
                time.sleep(_GRACE_SECONDS)
                os._exit(EXIT_CODE)

    def _hang(self, silent: float) -> outcome.Outcome:
        waiting = self._waiting or self.in_collective()
        how = "waits for other ranks" if waiting else "hangs"
        message = f"nothing moved for {silent:.0f} s while {self._doing}"
        return outcome.hang(self._rank, self._step, f"{how}: {message} (step {self._step})", waiting=waiting)


def _write_stacks(path: Path) -> None:
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
