"""`python -m mlpipe.train.worker`: one rank, started by torchrun (see `torchrun.py`). Sets the process up,
runs the stage, and says how it ended. MLPIPE_PLAN names the plan.json, MLPIPE_SCRATCH a folder shared with
the launcher.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES, FATAL_KINDS, MlpipeError
from mlpipe.plan.entry import package_of
from mlpipe.plan.plan import Plan
from mlpipe.train import outcome
from mlpipe.train.frames import own_frames, told
from mlpipe.train.out_of_memory import CAUSE, comes_again, is_out_of_memory, remedy
from mlpipe.train.rank_process import RankProcess
from mlpipe.train.stop import Stop, leave
from mlpipe.train.watchdog import Watchdog

# What a restart would only repeat.
_MISTAKES = (
    TypeError, ValueError, LookupError, AttributeError, NameError, AssertionError, NotImplementedError,
)  # fmt: skip
_OF_MACHINES = "gloo|nccl|cuda|cudnn|cublas|connect|timed out|out of memory|socket|address|process"


def main() -> int:
    """One rank from its start to its exit code."""
    began = time.time()
    scratch = Path(os.environ[environment.SCRATCH])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    plan = Plan.from_json(Path(os.environ[environment.PLAN]).read_bytes())
    process = RankProcess.from_environment()
    if outcome.fatal_files(scratch):
        return 1
    outcome.forget(scratch, process.rank)
    stop = Stop(scratch, process)
    timeout_seconds = plan.work.training.hang_timeout_seconds
    watchdog = Watchdog(scratch, rank=process.rank, timeout_seconds=timeout_seconds)
    progress = [0]
    stop.leave_until_begun()
    try:
        # after the handlers of signals: where nothing was preloaded, importing torch takes 2 s
        from mlpipe.train.session import Session

        session = Session(plan, process, stop, watchdog, began)
        try:
            ended = session.run(progress)
        finally:
            stop.begun.set()  # of what has no steps
            session.close()
        outcome.write(scratch, ended)
        leave(scratch, local_rank=process.local_rank, restart=process.restart)
        watchdog.leaving(0)
        return 0
    except Exception as error:
        traceback.print_exc()
        frames = own_frames(error, _packages(plan))
        ended = outcome.failed(error, rank=process.rank, step=progress[0])
        ended = replace(ended, message=f"{ended.message}{told(frames)}")
        if frames:  # below the whole traceback, where one looks first
            print(f"{type(error).__name__}: {error}{told(frames)}", file=sys.stderr)  # noqa: T201
        fatal = isinstance(error, MlpipeError) and (
            error.kind in FATAL_KINDS or getattr(error, "fatal", False)
        )
        if _lost_peer(error):
            ended = replace(ended, kind="infrastructure", message=f"lost a peer: {ended.message}")
        elif is_out_of_memory(getattr(error, "original", error)):
            fatal = comes_again(scratch, progress[0], process.restart)
            again = "; again after the same step, so it is not tried once more" if fatal else ""
            words, newline, calls = ended.message.partition("\n")
            hint = remedy(plan.work.training)
            ended = replace(ended, message=words + again + newline + calls, hint=hint, cause=CAUSE)
        elif progress[0] == 0 and _repeats(getattr(error, "original", error)):
            fatal = True
            hint = (
                "it failed before the first step was done, so it is not tried again; the rank's log has more"
            )
            ended = replace(ended, where=frames[-1].place if frames else ended.where, hint=hint)
        outcome.write(scratch, ended, fatal=fatal)
        exit_code = EXIT_CODES[ended.kind or "failed"]
        watchdog.leaving(exit_code)
        return exit_code


def _lost_peer(error: Exception) -> bool:
    """A collective failed because another rank is gone, which is not this rank's fault. gloo says so in the
    words of a RuntimeError, stores and NCCL by subclasses of DistError (torch/csrc/utils/exception.h)."""
    import torch.distributed as dist

    words = ("Connection closed by peer", "Connection reset by peer", "Connection refused")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(one in str(error) for one in words)
    )


def _repeats(error: Exception) -> bool:
    """A mistake in code, which would fail at every try: no lost file, device, peer or memory."""
    if (
        type(error) is RuntimeError
    ):  # torch's word for most things; lost peers and devices have subclasses too
        return not re.search(_OF_MACHINES, str(error), re.IGNORECASE)
    return isinstance(error, _MISTAKES)


def _packages(plan: Plan) -> set[str]:
    """Of the user's entries."""
    part = plan.work.training
    entries = [part.model.build, *part.data.functions]
    measured = part.validate.metrics if part.validate is not None else getattr(plan.work, "metrics", ())
    names = [*(entry.entry for entry in entries), *(metric.entry or "mlpipe" for metric in measured)]
    return {package_of(name) for name in names} - {"mlpipe"}


if __name__ == "__main__":
    sys.exit(main())
