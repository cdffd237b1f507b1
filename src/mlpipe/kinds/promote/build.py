"""Plans a promotion."""

from __future__ import annotations

from mlpipe.kinds.promote.plan import PromotePlan
from mlpipe.kinds.promote.spec import Promote
from mlpipe.plan.grace import FLOOR_SECONDS
from mlpipe.plan.launch import Given, single_process
from mlpipe.plan.plan import Launch
from mlpipe.plan.references import find_referred_to, stage_referred_to
from mlpipe.plan.training import trackers
from mlpipe.spec.model import Pipeline, Stage


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[PromotePlan, Launch]:
    """Which stage's checkpoint becomes a version of which model. Raises PlanError."""
    spec: Promote = stage.work
    evaluated = find_referred_to(pipeline, stage, "evaluate")
    trained = stage_referred_to(pipeline, stage, "train")
    promotion = PromotePlan(
        train_stage=trained.name,
        evaluate_stage=None if evaluated is None else evaluated.name,
        model_name=spec.as_,
        alias=spec.alias,
        dry_run=bool(spec.dry_run),
        track=tuple(one for one in trackers(trained.work) if one.name == "mlflow"),
    )
    return promotion, single_process(stage, given, shutdown_seconds=FLOOR_SECONDS)
