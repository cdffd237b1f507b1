"""One rank of mlpipe's side of `chats.py`: its own worker under its own launcher, whose loop waits for its
turns and says how many targets were learnt."""

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
    targets, held_out = [0], [0]
    record = running.recording.step

    def step(done: Any, total_tokens: float) -> None:
        targets[0] += done.target_tokens or 0
        record(done, total_tokens)

    def counted() -> dict[str, int]:
        count, targets[0] = targets[0], 0
        return {"targets": count, "held_out": held_out[0]}

    def validate() -> float:
        assert running.validation is not None
        measured = running.validation.held_out.measure(running.schedule, "validating", 0)
        held_out[0] = measured.num_targets
        return measured.values["loss"]

    running.recording.step = step  # type: ignore[method-assign]
    take_turns(session, running, progress, validate, counted)


if __name__ == "__main__":
    as_worker.run(train)
