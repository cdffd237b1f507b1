"""`python -m kit.tensor_worker`, one rank of tests/torch/test_tensor_parallel.py: passes of a tensor-parallel
model beside those of the same model alone. Rank 0 prints what it found, as JSON."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from kit import plans
from kit.counted import Counts
from torch import Tensor, nn

from mlpipe._core.errors import MlpipeError
from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.init import initialize
from mlpipe.train.model import build_model
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.schedules.accumulate import Accumulate
from mlpipe.train.slices import Slice, keep_slice, slices_of, whole_of
from mlpipe.train.world import World

BATCH, SEQ_LEN = 4, 32


def plan_of(mesh: Mesh, **changes: Any) -> TrainPlan:
    plan = plans.train_plan("", TOKENS, world_size=mesh.world_size, mesh=mesh, **changes).work
    assert isinstance(plan, TrainPlan)
    return plan


def parallelized(plan: TrainPlan, rank: int) -> tuple[ParallelizedModel, World]:
    world = World(plan.mesh, rank, torch.device("cpu"))
    built = build_model(plan.model, seed=1, device_type="cpu")
    return parallelize(built, world, plan), world


def batch() -> dict[str, Tensor]:
    tokens = torch.randint(256, (BATCH, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = -100
    return {"inputs": tokens[:, :-1], "targets": targets}


def step(model: ParallelizedModel, world: World) -> float:
    """The loss of two microbatches; their gradients stay."""
    both = [{key: value[i::2] for key, value in batch().items()} for i in range(2)]
    microbatches = [Microbatch(one, BATCH // 2 * SEQ_LEN, counts=True) for one in both]
    schedule = Accumulate(model, replace(world, mesh=Mesh(), rank=0))  # whose loss counts on every rank
    return float(schedule.forward_backward(microbatches).loss_sum)


def gradients(model: ParallelizedModel) -> dict[str, Tensor]:
    """Whole, on every rank."""
    cuts = slices_of(model.built.module)
    found = {}
    for name, parameter in model.built.module.named_parameters():
        assert parameter.grad is not None, name
        found[name] = whole_of(parameter.grad, cuts.get(id(parameter), ()))
    return found


PATTERNS = {
    "inner.embed": "row", **dict.fromkeys((f"*.attn.{name}" for name in "qkv"), "column"), "*.attn.o": "row",
    "*.head_norm": "sum", "*.mlp.1": "column", "*.mlp.3": "row",
}  # fmt: skip


def own(**patterns: str) -> ModelPlan:
    return ModelPlan(Entry("kit.models:with_heads", {}), None, SEQ_LEN, (), patterns)


def of_experts() -> ModelPlan:
    config = MoeConfig(
        **vars(plans.CONFIG) | {"dim": 32, "ffn_dim": 32},
        num_experts=4,
        experts_per_token=2,
        num_shared_experts=1,
        balance_rate=0.0,
    )
    return ModelPlan(Entry(MOE, asdict(config)), None, SEQ_LEN, ())


def apart(expected: dict[str, Tensor], found: dict[str, Tensor]) -> float:
    """The largest difference of any, relative to the largest value of all in its tensor."""
    differences = {name: (value - expected[name]).abs().max() for name, value in found.items()}
    return max(float(difference / expected[name].abs().max()) for name, difference in differences.items())


def compared(plan: ModelPlan, rank: int) -> dict[str, Any]:
    """The largest difference of any gradient in fp64, relative to the largest value of all in its tensor, and
    of the logits of a text whose length the ranks cannot share."""
    one, alone = parallelized(plan_of(Mesh(), model=plan), 0)
    two, world = parallelized(plan_of(Mesh(tp=2), model=plan), rank)
    for model in (one, two):
        model.built.module.double()
    losses = step(one, alone), step(two, world)
    worst = apart(gradients(one), gradients(two))
    text = {"inputs": batch()["inputs"][:1, :7]}
    with torch.no_grad():
        logits, right = two.module(text), one.module(text)
    assert logits.shape == right.shape
    return {"losses": losses, "gradient": worst, "logits": float((logits - right).abs().max())}


def counted(rank: int) -> dict[str, int]:
    """Collectives of a step of two microbatches."""
    found: Counter[str] = Counter()
    for mode in ("none", "full"):
        plan = plan_of(Mesh(tp=2), activation_checkpointing=mode)
        model, world = parallelized(plan, rank)
        with Counts() as counts:
            step(model, world)
        found += Counter({f"{mode} {name}": n for name, n in counts.found.items() if name.endswith(COUNTED)})
    return found


MISTAKES = {
    "no sum": {name: kind for name, kind in PATTERNS.items() if kind != "sum"},
    "no such module": {"blocks.*.attention": "column"},
    "no linear": {"*.norm": "row"},
}


def refused(patterns: dict[str, str], rank: int) -> str:
    """In which words."""
    try:
        model, world = parallelized(plan_of(Mesh(tp=2), model=own(**patterns)), rank)
        step(model, world)
    except MlpipeError as error:
        return f"{error.kind}: {error.message}"
    return ""


COUNTED = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_", "base_ bytes", "allreduce_ bytes")


class Twice(nn.Module):
    """Whose init_weights() comes back to a parameter after another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(8, 4))
        self.second = nn.Parameter(torch.empty(4, 6))

    def init_weights(self) -> None:
        self.first.normal_()
        self.second.uniform_()
        self.first.mul_(self.first.shape[0])
        self.second.copy_(self.first[:4].mean() + self.second)


def touched_twice(rank: int) -> bool:
    """Whether that gives what it gives where nothing is split."""
    alone, cut = Twice(), Twice()
    keep_slice(cut, "first", Slice("tp", 0, rank, 2), {})
    keep_slice(cut, "second", Slice("tp", 1, rank, 2), {})
    for model in (alone, cut):
        initialize(model, 3)
    cuts = slices_of(cut)
    whole = [whole_of(parameter, cuts[id(parameter)]) for parameter in cut.parameters()]
    return all(map(torch.equal, whole, alone.parameters()))


TOKENS = Path(sys.argv[-1])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"counts": counted(rank), "twice": touched_twice(rank)}
    as_it_is = Tensor.float
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    models = {"untied": plans.model_plan(tied=False), "tied": plans.model_plan(), "patterns": own(**PATTERNS)}
    models |= {"its own plan": own(), "experts": of_experts()}
    found |= {name: compared(model, rank) for name, model in models.items()}
    found["refused"] = {name: refused(patterns, rank) for name, patterns in MISTAKES.items()}
    Tensor.float = as_it_is  # type: ignore[method-assign]
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
