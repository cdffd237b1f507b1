"""`torchrun -m kit.many LIST`: runs the stages of several plans one after the other in one set of workers.

Importing torch costs seconds a process; the tests that compare many strategies pay it once. LIST is a
JSON file: {"plans": [[path of plan.json, scratch folder], ...], "resave": bool, "compiler": the backend of
torch.compile, or null for its own}. Failures are written where the launcher's workers write them; a hang is
ended by the watchdog of the plan that hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit.servers import free_port

from mlpipe.plan.plan import Plan
from mlpipe.train import outcome, prepare, resuming
from mlpipe.train.rank_process import RankProcess
from mlpipe.train.session import Session
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import Watchdog


def main() -> int:
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    process = RankProcess.from_environment()
    _until_rank_0_listens(process.rank)
    shared = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=process.rank == 0,
        timeout=timedelta(minutes=10),
    )
    asked = json.loads(Path(sys.argv[1]).read_text())
    if asked["resave"]:
        prepare.resume = _resume_and_save  # type: ignore[attr-defined]
    if asked["compiler"]:
        torch.compile = partial(torch.compile, backend=asked["compiler"])
    failed = False
    for number, (path, folder) in enumerate(asked["plans"]):
        # a store of its own for every plan, as in separate runs
        if process.rank == 0:
            shared.set(f"port-{number}", str(free_port()))
        os.environ["MASTER_PORT"] = shared.get(f"port-{number}").decode()
        _until_rank_0_listens(process.rank)
        scratch = Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        stop = Stop(scratch, process)
        plan = Plan.from_json(Path(path).read_bytes())
        watchdog = Watchdog(scratch, rank=process.rank, timeout_seconds=600)
        progress = [0]
        try:
            session = Session(plan, process, stop, watchdog, time.time())
            outcome.write(scratch, session.run(progress))
            session.close()
        except Exception as error:
            print(f"{path}: {traceback.format_exc()}", file=sys.stderr, flush=True)
            outcome.write(scratch, outcome.failed(error, rank=process.rank, step=progress[0]))
            failed = True
        if not dist.is_initialized():
            break  # the ranks could not even meet
        dist.barrier()
        dist.destroy_process_group()
    return int(failed)


def _until_rank_0_listens(rank: int) -> None:
    """Whoever comes too early would ask again after a quarter of a second, while all others wait for it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    deadline = time.monotonic() + 60.0  # then torch says what it meets
    while rank and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5.0):
            return
        time.sleep(0.005)


_resume = resuming.resume


def _resume_and_save(
    session: Session, checkpointer: Any, parallel: Any, update: Any, coordination_store: Any
) -> resuming.Position:
    position = _resume(session, checkpointer, parallel, update, coordination_store)
    scalars = {"step": position.step, "samples": position.samples}
    checkpointer.save(position.step, resuming.stored(parallel, update), scalars)
    checkpointer.finish()
    return position


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
