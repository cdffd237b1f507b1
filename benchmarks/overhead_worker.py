"""One rank of `benchmarks.overhead`, started by torchrun: PLAN ANSWER ROUNDS STEPS."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.measure import rounds
from benchmarks.plain import PlainScript
from mlpipe.plan.plan import Plan
from mlpipe.train.loop import prepare
from mlpipe.train.session import Session
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import Watchdog
from mlpipe.train.worker import Place

_WARM_UP_STEPS = 3


def main() -> None:
    plan = Plan.from_json(Path(sys.argv[1]).read_bytes())
    answer, num_rounds, num_steps = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    if plan.train is None:
        raise ValueError("not the plan of a train stage")
    place = Place.from_environment()
    scratch = Path(tempfile.mkdtemp())
    stop = Stop(
        scratch,
        rank=place.rank,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        restart=0,
    )
    watchdog = Watchdog(scratch, rank=place.rank, timeout_seconds=3600)
    session = Session(plan, place, stop, watchdog, time.time())
    loop = prepare(session, plan.train, [0])
    plain, control = (PlainScript(plan.train, plan.train.strategy) for _ in range(2))
    tokens = num_steps * plan.train.global_batch * plan.train.model.seq_len

    def block(step: Callable[[], object]) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                step()
            dist.barrier()
            spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
            dist.all_reduce(spent)
            seconds, cpu_seconds = spent.tolist()
            return {
                "tokens_per_second": tokens / (seconds / dist.get_world_size()),
                "tokens_per_cpu_second": tokens / cpu_seconds,
            }

        return run

    for step in (loop.step, plain.step, control.step):
        for _ in range(_WARM_UP_STEPS):
            step()
    found = {
        "ours": rounds(block(loop.step), block(plain.step), num_rounds),
        "control": rounds(block(control.step), block(plain.step), num_rounds),
    }
    if place.rank == 0:
        answer.write_text(json.dumps(found))
    session.close()
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
