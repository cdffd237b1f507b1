"""One rank of `benchmarks.checkpoint`, started by torchrun: PLAN ANSWER ROUNDS FOLDER."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from benchmarks.measure import rounds
from benchmarks.plain import PlainScript
from mlpipe.plan.plan import Plan
from mlpipe.train.loop import prepare
from mlpipe.train.session import Session
from mlpipe.train.stop import Stop
from mlpipe.train.watchdog import Watchdog
from mlpipe.train.worker import Place

_STEPS = 2


class Ours:
    """The real loop and its checkpointer; the waits before an update are summed as they happen."""

    def __init__(self, session: Session, plan: Plan) -> None:
        if plan.train is None:
            raise ValueError("not the plan of a train stage")
        self.loop = prepare(session, plan.train, [0])
        self.step: Callable[[], object] = self.loop.step
        self.waited = 0.0
        before_update = self.loop.checkpointer.before_update

        def timed() -> float:
            seconds = before_update()
            self.waited += seconds
            return seconds

        self.loop.checkpointer.before_update = timed  # type: ignore[method-assign]

    def save(self) -> None:
        self.loop.save()

    def finish(self) -> None:
        self.loop.checkpointer.finish()


class Peer:
    """A plain FSDP2 script with DCP's asynchronous save at its defaults. Making the state dict is not counted
    as stall, to the peer's favour."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        if plan.train is None:
            raise ValueError("not the plan of a train stage")
        self.script = PlainScript(plan.train, "fsdp")
        self.step: Callable[[], object] = self.script.step
        self.folder = folder
        self.number = 0
        self.waited = 0.0
        self.state: dict[str, object] = {}
        # Its planning runs collectives in a thread beside training: on the one group both abort (gloo).
        self.group = dist.new_group(backend="gloo")

    def prepare(self) -> None:
        model, optimizer = get_state_dict(self.script.model, self.script.optimizer)
        self.state = {"model": model, "optimizer": optimizer}

    def save(self) -> None:
        self.number += 1
        self.future = dcp.async_save(
            self.state, checkpoint_id=self.folder / str(self.number), process_group=self.group
        )

    def finish(self) -> None:
        self.future.result()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / str(self.number))


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    plan = Plan.from_json(Path(sys.argv[1]).read_bytes())
    answer, num_rounds, folder = Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
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
    ours, peer = Ours(session, plan), Peer(plan, folder)
    owned = ours.loop.parallel.owned
    gib = 3 * sum(item.local.nbytes for item in owned if item.parameter is not None) / 2**30

    def steps(side: Ours | Peer) -> float:
        def run() -> None:
            for _ in range(_STEPS):
                side.step()

        dist.barrier()
        return timed(run)

    def save(side: Ours | Peer) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            without = steps(side)
            if isinstance(side, Peer):
                side.prepare()
            side.waited = 0.0
            dist.barrier()
            called = timed(side.save)
            after = timed(lambda: [side.step() for _ in range(_STEPS)])
            stall = called + side.waited
            side.finish()
            dist.barrier()
            # the slower rank holds up the other: the larger figure counts
            worst = torch.tensor([stall, called + after - without], dtype=torch.float64)
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            return {
                "stall_seconds_per_gib": float(worst[0]) / gib,
                "extra_seconds_per_gib": float(worst[1]) / gib,
            }

        return run

    for side in (ours, peer):  # warm-up, and each side's first save
        steps(side)
        save(side)()
    found = {
        "saves": rounds(save(ours), save(peer), num_rounds),
        "control": rounds(save(peer), save(peer), max(1, num_rounds // 2)),
        "gib_per_rank": gib,
    }
    if place.rank == 0:
        answer.write_text(json.dumps(found))
    session.close()
    dist.barrier()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
