"""Ends a run that hangs: no heartbeat for so long, and the stacks of all threads of all ranks are kept."""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from pathlib import Path

from mlpipe.train import outcome

_POLL_SECONDS = 0.5
# After the first rank noticed, the others get this long to write their stacks too.
_GRACE_SECONDS = 2.0
# Before the first step: a busy machine imports torch, and a big checkpoint loads, for longer than a step.
STARTING_SECONDS = 600.0
EXIT_CODE = 75


class Watchdog:
    """`beat` says that something moved, and where the loop is. A rank that sees another rank's hang
    writes its own stacks, so that the one rank that never entered the collective shows."""

    def __init__(self, scratch: Path, *, rank: int, timeout_seconds: float) -> None:
        self._scratch = scratch
        self._rank = rank
        self._timeout_seconds = timeout_seconds
        self._last = time.monotonic()
        self._doing = "starting"
        self._step = 0
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def beat(self, doing: str, step: int) -> None:
        self._doing = doing
        self._step = step
        self._last = time.monotonic()

    def _watch(self) -> None:
        stacks = self._scratch / f"stacks-rank-{self._rank}.txt"
        while True:
            time.sleep(_POLL_SECONDS)
            silent = time.monotonic() - self._last
            patience = self._timeout_seconds
            if self._step == 0:
                patience = max(patience, STARTING_SECONDS)
            if silent > patience:
                _write_stacks(stacks)
                found = outcome.Outcome(
                    "failed",
                    self._step,
                    self._rank,
                    "failed",
                    f"rank {self._rank} hangs: nothing moved for {silent:.0f} s while {self._doing} "
                    f"(step {self._step})",
                    where=f"rank {self._rank}",
                    hint="the stacks of every rank lie in the attempt's postmortem/ folder; "
                    "raise `hang_timeout` if this step is just slow",
                    time=time.time(),
                    cause="hang",
                )
                outcome.write(self._scratch, found, fatal=True)
                time.sleep(_GRACE_SECONDS)
                os._exit(EXIT_CODE)
            if outcome.fatal_files(self._scratch):
                _write_stacks(stacks)
                time.sleep(_GRACE_SECONDS)
                os._exit(EXIT_CODE)


def _write_stacks(path: Path) -> None:
    with path.open("w") as file:
        faulthandler.dump_traceback(file, all_threads=True)
