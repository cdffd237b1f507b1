"""`torchrun -m kit.apart LIST`: as kit.many, of two islands. In a run `apart` rank 1 does not begin step 3
before rank 0 has ended one that is ahead as far as it may be; in a run `poisoned` its loss of step 3 is not
finite."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
from kit import many
from kit.command_runs import until

from mlpipe.train.schedules import LossSum
from mlpipe.train.stale_loop import StaleLoop

HELD = 3
_step, _gradients = StaleLoop.step, StaleLoop.gradients


def _apart(loop: StaleLoop) -> tuple[bool, bool]:
    session, number = loop.session, loop.position.step + 1
    if session.plan.run_id != "apart":
        return _step(loop)
    ends = Path(sys.argv[1]).parent
    if session.process.rank == 1 and number == HELD:
        furthest = ends / f"0-{HELD - 1 + loop.staleness}"
        until(furthest.exists, f"rank 0 to end what {furthest.name} says", 60)
    agreed = _step(loop)
    (ends / f"{session.process.rank}-{number}").touch()
    if number > loop.staleness:
        other = ends / f"{1 - session.process.rank}-{number - loop.staleness - 1}"
        assert other.exists() or number - loop.staleness == 1, f"ahead of {other.name}"
    return agreed


def _poisoned(loop: StaleLoop, number: int, batches: Any) -> LossSum:
    sums = _gradients(loop, number, batches)
    if (loop.session.plan.run_id, loop.session.process.rank, number) != ("poisoned", 1, HELD):
        return sums
    return sums._replace(loss_sum=torch.full_like(sums.loss_sum, math.nan))


if __name__ == "__main__":
    StaleLoop.step = _apart  # type: ignore[method-assign, assignment]
    StaleLoop.gradients = _poisoned  # type: ignore[method-assign, assignment]
    code = many.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
