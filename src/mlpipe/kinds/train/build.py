"""Plans a training."""

from __future__ import annotations

from dataclasses import replace

from mlpipe.kinds.train.spec import Train
from mlpipe.plan.launch import Given, workers
from mlpipe.plan.plan import Launch, Replicas, TrainPlan
from mlpipe.plan.training import train_plan
from mlpipe.spec.model import Pipeline, Stage


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[TrainPlan, Launch]:
    """The best way to train on what is given, as ranks that save when they are stopped. Raises PlanError."""
    spec: Train = stage.work
    training = train_plan(spec, given.hardware, given.known, resume=given.resume, traced=given.traced)
    port = None if spec.metrics_port == "off" else spec.metrics_port
    launch = workers(stage, given, training, saves=True, max_restarts=spec.max_restarts, metrics_port=port)
    replicas = stage.resources.replicas if stage.resources is not None else None
    return training, launch if replicas is None else replace(launch, replicas=Replicas(*replicas))
