"""What a calibration says of a training that has run, whatever it was planned by."""

from __future__ import annotations

import dataclasses

from mlpipe._core.errors import PlanError
from mlpipe.plan.calibration import Calibration
from mlpipe.plan.candidates import priced
from mlpipe.plan.choose import Candidate
from mlpipe.plan.hardware import detect_hardware
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import TrainPlan
from mlpipe.spec.model import Pipeline


def predict_again(pipeline: Pipeline, calibration: Calibration, plan: Plan) -> Candidate:
    """The training of a preset that `plan` was made for, by the figures of `calibration` alone, without what
    runs have corrected. Raises PlanError."""
    train, launch = plan.part(TrainPlan), plan.launch
    assert train is not None
    if launch.device != calibration.device:
        raise PlanError(
            f"measured on {calibration.device}, and stage {plan.stage!r} ran on {launch.device}",
            hint="run mlpipe calibrate where it ran",
        )
    alone = dataclasses.replace(calibration, runs=())
    resources = pipeline.stage(plan.stage).resources
    here = detect_hardware(resources and resources.model_copy(update={"hardware": None}))
    speed = alone.speed(launch.nproc_per_node, here.speed)
    if train.precision not in speed.kernels:
        raise PlanError(f"the file has no {train.precision}", hint="run mlpipe calibrate once more")
    there = here._replace(
        num_nodes=launch.num_nodes,
        devices_per_node=launch.nproc_per_node,
        memory_bytes=train.memory_bytes or here.memory_bytes,
        speed=speed,
    )
    return priced(train, there)
