"""One rank of mlpipe's side of `meshes.py`: its own worker under its own launcher, whose loop waits for its
turns. Asked to validate it says the last step's loss."""

from __future__ import annotations

from typing import Any

from benchmarks import as_worker
from benchmarks.peers.mlpipe_worker import take_turns
from mlpipe.plan.work import TrainPlan
from mlpipe.train import prepare
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session


def train(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Instead of the trainer's: the same steps, each when it is this side's turn."""
    running = prepare.prepare(session, plan, progress, prepare.make_callbacks(session, plan))
    losses: list[float | None] = [None]
    record = running.recording.step

    def step(done: Any, total_tokens: float) -> None:
        losses[-1] = done.loss
        record(done, total_tokens)

    running.recording.step = step  # type: ignore[method-assign]
    take_turns(session, running, progress, lambda: losses[-1])


if __name__ == "__main__":
    as_worker.run(train)
