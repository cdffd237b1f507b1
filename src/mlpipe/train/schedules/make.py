"""The schedule that a plan asks for."""

from __future__ import annotations

from collections.abc import Callable

from mlpipe.plan.work import TrainPlan
from mlpipe.train.parallel.parallelized_model import ParallelizedModel, nothing
from mlpipe.train.schedules import Schedule
from mlpipe.train.schedules.accumulate import Accumulate
from mlpipe.train.world import World


def make_schedule(
    plan: TrainPlan, model: ParallelizedModel, world: World, before_microbatch: Callable[[], None] = nothing
) -> Schedule:
    """`before_microbatch`: called before each forward pass, and of a pipeline before each backward pass."""
    if plan.mesh.pp == 1:
        return Accumulate(model, world, before_microbatch)
    from mlpipe.train.schedules.pipelined import Pipelined

    assert plan.pipeline is not None
    return Pipelined(model, world, plan.pipeline.schedule, before_microbatch)
