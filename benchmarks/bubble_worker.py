"""A rank of `benchmarks.bubble`: the trainer's pipeline over blocks that sleep."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import run, train_plan
from mlpipe._core.pipelines import Schedule, stages_per_rank
from mlpipe._core.presets import LLAMA, PRESETS
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.model import build_model
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.schedules import deferred_weights
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.world import World

BLOCKS_PER_RANK = 2
DIM, VOCAB, TOKENS = 16, 32, 8


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_seconds = backward
        busy(forward)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        busy(ctx.backward_seconds)
        return gradient.clone(), None, None


class SleepingBlock(nn.Module):
    """In the place of a block of a Llama. `backward`: what of a backward pass is not put off."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)
        self.seconds = forward, backward

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(self.linear(x), *self.seconds)
        return y


spent = 0.0  # in blocks, by the clock: to sleep takes a little longer than asked for


def busy(seconds: float) -> None:
    global spent
    began = time.perf_counter()
    time.sleep(seconds)
    spent += time.perf_counter() - began


def pipeline_plan(schedule: Schedule, num_ranks: int) -> TrainPlan:
    config = replace(
        next(iter(PRESETS.values())), vocab_size=VOCAB, dim=DIM, num_layers=BLOCKS_PER_RANK * num_ranks,
        num_heads=2, num_kv_heads=2, ffn_dim=DIM, max_seq_len=TOKENS, tied=False,
    )  # fmt: skip
    own = stages_per_rank(schedule)
    return train_plan(
        model=ModelPlan(Entry(LLAMA, asdict(config)), None, TOKENS, ()),
        mesh=Mesh(pp=num_ranks),
        pipeline=PipelinePlan(schedule, (BLOCKS_PER_RANK // own,) * (own * num_ranks)),
        activation_checkpointing="none",
        compile="off",
        precision="fp32",
        seed=1,
    )


def measure(schedule: Schedule, num_microbatches: int, seconds: float, steps: int) -> dict[str, Any]:
    """The first step, which tells shapes and fills caches, does not count."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    world = World(Mesh(pp=num_ranks), rank, torch.device("cpu"))
    plan = pipeline_plan(schedule, num_ranks)
    built = build_model(plan.model, seed=1, device_type="cpu")
    each = seconds / BLOCKS_PER_RANK
    deferred = schedule == "zero_bubble"
    layers: Any = built.model.layers
    with torch.device("meta"):
        for number in range(len(layers)):
            layers[number] = SleepingBlock(each, each if deferred else 2 * each)
    built.blocks = list(layers)
    model = parallelize(built, world, plan)
    runner = make_schedule(plan, model, world)
    tokens = torch.zeros((1, TOKENS), dtype=torch.int64)
    batches = [Microbatch({"inputs": tokens, "targets": tokens}, TOKENS)] * num_microbatches
    real = deferred_weights._product

    def slow_product(inputs: Tensor, gradient: Tensor) -> Tensor:
        if deferred and gradient.shape[-1] == DIM:  # of a block, not of the head
            busy(each)
        return real(inputs, gradient)

    deferred_weights._product = slow_product
    found: dict[str, Any] = {
        "schedule": schedule, "num_microbatches": num_microbatches, "idle": [], "bubble": [],
    }  # fmt: skip
    global spent
    for step in range(1 + steps):
        model.waits.take()
        dist.barrier()
        spent, began = 0.0, time.perf_counter()
        runner.forward_backward(batches)
        own = time.perf_counter() - began
        dist.barrier()  # as the ranks agree at the end of a step
        seconds_in_all = time.perf_counter() - began
        _, of_stages = model.waits.take()
        sums = torch.tensor([spent, seconds_in_all, of_stages + seconds_in_all - own], dtype=torch.float64)
        dist.all_reduce(sums)
        worked, whole, waited = sums.tolist()
        if step:
            found["idle"].append(1 - worked / whole)
            found["bubble"].append(waited / whole)
    deferred_weights._product = real
    return found


def measured(asked: dict[str, Any]) -> list[dict[str, Any]]:
    return [measure(*work, asked["seconds"], asked["steps"]) for work in asked["works"]]


if __name__ == "__main__":
    run(measured)
