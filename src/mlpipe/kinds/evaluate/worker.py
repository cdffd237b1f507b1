"""What each rank of an evaluation does."""

from __future__ import annotations

from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.train.evaluate import evaluate
from mlpipe.train.outcome import Outcome
from mlpipe.train.session import Session


def run(session: Session, plan: EvaluatePlan, progress: list[int]) -> Outcome:
    """Loss, gate and sample; there are no steps to tell of in `progress`."""
    return evaluate(session, plan)
