"""One rank of mlpipe's side: its own worker under its own launcher, whose loop waits for its turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

from benchmarks import as_worker
from benchmarks.peers.work import Turns, read_work, validation_batches
from mlpipe.plan.work import TrainPlan
from mlpipe.train import prepare
from mlpipe.train.loop import Loop
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's: the same steps, each when it is this side's turn."""
    work = read_work()
    running = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    batches = validation_batches(work, session.rank, session.world.size)

    @torch.no_grad()
    def validate() -> float:
        found = [running.model.module({"inputs": x, "targets": y}) for x, y in batches]
        return sum(float(loss) / float(count) for loss, count in found) / len(found)

    take_turns(session, running, progress, validate)


def take_turns(
    session: Session,
    running: Loop,
    progress: list[int],
    validate: Callable[[], float | None],
    counted: Callable[[], dict[str, int]] = dict,
) -> NoReturn:
    """A step whenever the benchmark says so, until it ends this process."""
    work = read_work()
    waiting = Turns(work.socket, work.side, session.rank, validate, counted)
    while True:
        session.watchdog.beat("waiting for its turn", progress[0])
        waiting.before_step()
        running.step()


if __name__ == "__main__":
    as_worker.run(train)
