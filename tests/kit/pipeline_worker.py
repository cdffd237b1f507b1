"""`python -m kit.pipeline_worker TOKENS`, one rank of four of tests/torch/test_pipeline.py: gradients in fp64
of pipelines whose stages lie on two ranks each, beside those of the same model alone. Rank 0 prints the
largest difference by mesh and schedule, as JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import plans
from torch import Tensor

from mlpipe.plan.plan import Mesh, PipelinePlan, TrainPlan
from mlpipe.train.microbatch import Microbatch, own_part
from mlpipe.train.model import build_model
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.slices import slices_of, whole_of
from mlpipe.train.world import World

BLOCKS = {"gpipe": (3, 2), "1f1b": (2, 3), "interleaved": (2, 1, 1, 1), "zero_bubble": (2, 3)}
WORKS = [("tp", schedule) for schedule in BLOCKS] + [("cp", "zero_bubble")]
SEQ_LEN, MICROBATCHES = 16, 4


def gradients(mesh: Mesh, schedule: Any, rank: int) -> dict[str, Tensor]:
    """By name those that this rank has, whole, of the sum of all targets' losses."""
    plan = plans.train_plan(
        "", TOKENS, world_size=mesh.world_size, mesh=mesh, micro_batch=1, accumulation=MICROBATCHES,
        model=plans.model_plan(num_layers=5, dim=32, ffn_dim=64),
        pipeline=PipelinePlan(schedule, BLOCKS[schedule]) if mesh.pp > 1 else None,
    ).work  # fmt: skip
    assert isinstance(plan, TrainPlan)
    world = World(mesh, rank, torch.device("cpu"))
    built = build_model(plan.model, seed=1, device_type="cpu")
    model = parallelize(built, world, plan)
    model.built.module.double()
    tokens = torch.randint(256, (MICROBATCHES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    batches: list[Microbatch] = []
    for row in tokens:
        whole = {"inputs": row[None, :-1], "targets": row[None, 1:].clone()}
        whole["targets"][0, :3] = -100
        batches.append(own_part(whole, world, SEQ_LEN))
    make_schedule(plan, model, world).forward_backward(batches)
    cuts = slices_of(model.built.module)
    found = {}
    for name, parameter in model.built.module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = world.num_gradient_ranks * whole_of(parameter.grad, cuts.get(id(parameter), ()))
    return found


TOKENS = Path(sys.argv[-1])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    expected = gradients(Mesh(), "1f1b", 0)
    found = {}
    for axis, schedule in WORKS:
        mine = gradients(Mesh(pp=2, **{axis: 2}), schedule, rank)
        differences = [
            (one - expected[name]).abs().max() / expected[name].abs().max() for name, one in mine.items()
        ]
        worst, number = torch.stack(differences).amax(), torch.tensor(len(mine))
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        dist.all_reduce(number)
        # the tied head lies on both stages; two ranks have each parameter
        assert number == 2 * (len(expected) + 1)
        found[f"{axis} {schedule}"] = float(worst)
    if rank == 0:
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort at the interpreter's end


if __name__ == "__main__":
    main()
