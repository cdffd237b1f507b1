"""A rank of `benchmarks.uneven`: the trainer's schedule and FSDP2 over blocks that sleep, for as long as the
microbatch's work says."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.measure import Round, rounds
from benchmarks.ranks import run, train_plan
from benchmarks.uneven import NUM_BLOCKS
from mlpipe._core.presets import LLAMA, PRESETS
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.train.data.microbatch import Microbatch, uncounted
from mlpipe.train.model import build_model
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.world import World

DIM, VOCAB, TOKENS = 16, 32, 8
seconds = 0.0  # of the current microbatch, forward and backward, in all blocks


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(seconds / NUM_BLOCKS / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * seconds / NUM_BLOCKS / 3)
        return gradient.clone()


class SleepingBlock(nn.Module):
    """In the place of a block of a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y: Tensor = _Sleep.apply(self.linear(x))
        return y


class Side:
    """One way to wait, with its own copy of the model. `works`: of each step, of each rank, of each of its
    microbatches, in seconds; 0: it does not count."""

    def __init__(self, communication: str, works: list[list[list[float]]]) -> None:
        self.works = works
        mesh = Mesh(dp_shard=dist.get_world_size())
        self.world = World(mesh, dist.get_rank(), torch.device("cpu"))
        config = replace(
            next(iter(PRESETS.values())), vocab_size=VOCAB, dim=DIM, num_layers=NUM_BLOCKS,
            num_heads=2, num_kv_heads=2, ffn_dim=DIM, max_seq_len=TOKENS, tied=False,
        )  # fmt: skip
        plan = train_plan(
            model=ModelPlan(Entry(LLAMA, asdict(config)), None, TOKENS, ()),
            mesh=mesh,
            communication=communication,
            reshard_after_forward=communication != "resident",
            activation_checkpointing="none",
            compile="off",
            precision="fp32",
            seed=1,
        )
        built = build_model(plan.model, seed=1, device_type="cpu")
        layers: Any = built.model.layers
        with torch.device("meta"):
            for number in range(len(layers)):
                layers[number] = SleepingBlock()
        built.blocks = list(layers)
        self.model = parallelize(built, self.world, plan)
        self.schedule = make_schedule(plan, self.model, self.world, self._next)
        self._queue: list[float] = []
        self.steps()

    def _next(self) -> None:
        global seconds
        seconds = self._queue.pop(0)

    def steps(self) -> dict[str, float]:
        """All of them: seconds, and of these the share in which the ranks wait for each other."""
        tokens = torch.zeros((1, TOKENS), dtype=torch.int64)
        one = Microbatch({"inputs": tokens, "targets": tokens}, TOKENS)
        self.model.waits.take()
        dist.barrier()
        began = time.perf_counter()
        for ranks in self.works:
            self._queue = list(ranks[self.world.rank])
            self.schedule.forward_backward([one if work else uncounted(one) for work in self._queue])
            dist.barrier()  # as the ranks agree at the end of a step
            self.model.module.zero_grad(set_to_none=True)
        return {"seconds": time.perf_counter() - began}


def measured(asked: dict[str, Any]) -> list[Round]:
    sides = {name: Side(*side) for name, side in asked["sides"].items()}
    return rounds({name: side.steps for name, side in sides.items()}, asked["rounds"])


if __name__ == "__main__":
    run(measured)
