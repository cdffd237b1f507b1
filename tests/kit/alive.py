"""`torchrun -m kit.alive LIST`: as kit.many; each rank writes beside LIST, as `alive-<run id>-<rank>.json`,
how many bytes of tensors were alive at most in the passes of the last step, weights and optimizer states with
them. What lies within a kernel is not seen, nor what has no memory."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from kit import many

from mlpipe.train.outcome import Outcome
from mlpipe.train.schedules.accumulate import Accumulate
from mlpipe.train.schedules.pipelined import Pipelined
from mlpipe.train.session import Session
from mlpipe.train.trace import _Meter

METER: list[_Meter] = []
_run = Session.run


class Alive(_Meter):  # type: ignore[no-untyped-call]
    """Bytes only."""

    def __init__(self) -> None:
        super().__init__([])

    def _count(self, *args: Any) -> None: ...

    def _remember(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type != "meta":
            super()._remember(storage)


def _from_here(schedule: Any) -> None:
    """The most is that of the last step."""
    forward_backward = schedule.forward_backward

    def counted(self: Any, batches: Any) -> Any:
        METER[-1].most = METER[-1].alive
        found = forward_backward(self, batches)
        METER[-1].kept = METER[-1].most
        return found

    schedule.forward_backward = counted


def _counted(session: Session, progress: list[int]) -> Outcome:
    METER.append(Alive())
    with METER[-1]:
        ended: Outcome = _run(session, progress)
    path = Path(sys.argv[1]).with_name(f"alive-{session.plan.run_id}-{session.process.rank}.json")
    path.write_text(json.dumps(METER[-1].kept))
    return ended


if __name__ == "__main__":
    Session.run = _counted  # type: ignore[method-assign, assignment]
    for schedule in (Accumulate, Pipelined):
        _from_here(schedule)
    code = many.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
