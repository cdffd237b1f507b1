"""Plans an evaluation. On resources of its own, perhaps of another number, the strategy is chosen anew."""

from __future__ import annotations

from mlpipe._core.errors import PlanError
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.kinds.evaluate.spec import Evaluate
from mlpipe.plan.launch import Given, workers
from mlpipe.plan.plan import Launch
from mlpipe.plan.references import stage_referred_to
from mlpipe.plan.training import evaluation_plan, metric_plans, trackers
from mlpipe.spec.model import Pipeline, Stage


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[EvaluatePlan, Launch]:
    """Forward passes over a checkpoint of the training that the stage is about. Raises PlanError."""
    trained = stage_referred_to(pipeline, stage, "train")
    validate = trained.work.validate_
    own_resources = stage.resources is not None or bool(trained.groups)
    forwards = evaluation_plan(trained.work, given.hardware, given.known, own_resources=own_resources)
    spec: Evaluate = stage.work
    if spec.weights == "ema" and trained.work.ema is None:
        raise PlanError(
            f"stage {trained.name!r} keeps no average of its weights",
            where=stage.name,
            hint=f"add 'ema: {{decay: 0.999}}' to {trained.name!r}, or write weights: last",
        )
    if spec.checkpoint == "best" and (validate is None or validate.best is None):
        raise PlanError(
            f"stage {trained.name!r} has no best checkpoint",
            where=f"{stage.name}.evaluate.checkpoint",
            hint="add 'validate: {every: ..., best: {metric: loss}}' to the training, or evaluate the latest",
        )
    if any(files.validation is None for files in forwards.data.all_files):
        raise PlanError(
            f"stage {trained.name!r} has no held-out files to evaluate with",
            where=f"{trained.name}.train.data",
            hint="add 'validation: ...' beside its files",
        )
    evaluation = EvaluatePlan(
        train_stage=trained.name,
        train=forwards,
        data=forwards.data,
        max_tokens=spec.max_tokens,
        gate=spec.gate,
        prompt=spec.prompt,
        generate_tokens=spec.generate_tokens,
        weights=spec.weights if spec.weights == "ema" else None,
        checkpoint=spec.checkpoint or "latest",
        metrics=metric_plans(spec.metrics or (), given.known),
        track=trackers(trained.work),
    )
    return evaluation, workers(stage, given, forwards)
