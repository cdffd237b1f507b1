"""Plans a training."""

from __future__ import annotations

from mlpipe._core.errors import PlanError
from mlpipe._core.feasibility import ELASTIC_EXPERTS
from mlpipe._core.presets import MOE
from mlpipe.kinds.train.spec import Train
from mlpipe.plan.candidates import refuse
from mlpipe.plan.launch import Given, workers
from mlpipe.plan.plan import Launch, Replicas
from mlpipe.plan.training import train_plan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.model import Pipeline, Stage


def plan(pipeline: Pipeline, stage: Stage, given: Given) -> tuple[TrainPlan, Launch]:
    """The best way to train on what is given, as ranks that save when they are stopped. Raises PlanError."""
    spec: Train = stage.work
    training = train_plan(spec, given.hardware, given.known, resume=given.resume, traced=given.traced)
    port = None if spec.metrics_port == "off" else spec.metrics_port
    launch = workers(stage, given, training, saves=True, max_restarts=spec.max_restarts, metrics_port=port)
    replicas = stage.resources.replicas if stage.resources is not None else None
    if replicas is None:
        return training, launch
    if training.model.build.entry == MOE:  # of open weights: presets are refused by the file
        refuse(ELASTIC_EXPERTS, where=f"stage {stage.name!r}")
    others = [axis for axis in ("pp", "cp", "tp", "ep") if getattr(training.mesh, axis) > 1]
    if others or training.communication != "collective":
        what = others[0] if others else f"communication: {training.communication}"
        raise PlanError(
            f"{what} is the fastest that fits, and nodes that come and go do not have it within",
            where=f"stage {stage.name!r}",
            hint="write communication: collective and a mesh of dp_replicate and dp_shard, or one number of "
            "nodes",
        )
    return training, launch._replace(replicas=Replicas(*replicas))
