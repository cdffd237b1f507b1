"""How long a stage that is told to stop may take: the running step, then a save."""

from __future__ import annotations

import math

from mlpipe.plan.memory import saved_bytes
from mlpipe.plan.optimizers import optimizer_cost
from mlpipe.plan.shapes import trained
from mlpipe.plan.work import TrainPlan

# The floor: a step and a save of any model that fits a few GPUs. The ceiling: for whoever waits.
FLOOR_SECONDS, CEILING_SECONDS, STEP_SECONDS = 600.0, 3600.0, 120.0
# Of one node into an object store over 1 GbE: less than any cluster for training should have.
SAVE_BYTES_PER_SECOND = 100e6


def checkpoint_bytes(train: TrainPlan) -> int | None:
    """Weights and optimizer states; None for a user's own model, whose size shows when it runs."""
    shape = trained.planned(train)
    if shape is None or train.num_flops_per_token is None:
        return None
    return saved_bytes(shape.parameters, optimizer_cost(train), num_ranks=1)


def save_seconds(train: TrainPlan, nproc_per_node: int) -> float | None:
    """Of a checkpoint that is written once, over the nodes that share a copy of the model."""
    num_bytes = checkpoint_bytes(train)
    if num_bytes is None:
        return None
    nodes = max(1, train.mesh.world_size // train.mesh.dp_replicate // nproc_per_node)
    return num_bytes / nodes / SAVE_BYTES_PER_SECOND


def shutdown_seconds(train: TrainPlan | None, nproc_per_node: int) -> float:
    """Between SIGTERM and SIGKILL, in whole seconds."""
    save = save_seconds(train, nproc_per_node) if train is not None else None
    return float(min(CEILING_SECONDS, max(FLOOR_SECONDS, math.ceil(STEP_SECONDS + (save or 0)))))
