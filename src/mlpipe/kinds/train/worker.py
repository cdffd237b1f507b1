"""What each rank of a training does."""

from __future__ import annotations

import mlpipe.train.models.llama  # noqa: F401  # with the first import: ranks are forked behind it
from mlpipe.plan.work import TrainPlan
from mlpipe.train.outcome import Outcome
from mlpipe.train.prepare import train
from mlpipe.train.session import Session


def run(session: Session, plan: TrainPlan, progress: list[int]) -> Outcome:
    """Up to the last step, or until it is told to stop; `progress[0]` follows the last finished step."""
    return train(session, plan, progress)
