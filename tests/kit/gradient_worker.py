"""`python -m kit.gradient_worker TOKENS`, one rank of four of tests/torch/test_gradients.py: gradients in
fp64 of one step under each technique and mix of two, beside those of the same model alone. Rank 0 prints the
largest difference of each, relative to the largest gradient in its tensor, as JSON."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit import plans
from torch import Tensor

from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.work import GroupPlan, TrainPlan
from mlpipe.train import model as models
from mlpipe.train.data.loader import MicrobatchLoader
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.schedules.make import make_schedule
from mlpipe.train.shards import LocalShard, local_part
from mlpipe.train.world import World

SEQ_LEN, SAMPLES = 16, 8
SIZES = {"dim": 32, "ffn_dim": 64}
BLOCKS = {"gpipe": (3, 2), "1f1b": (2, 3), "interleaved": (2, 1, 1, 1), "zero_bubble": (2, 3)}
LAYERS = {True: 5, False: 3}  # of a model that is cut into these, of another
MIXES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "ddp": (Mesh(dp_replicate=4), {}),
    "zero1": (Mesh(dp_replicate=4), {"strategy": "zero1"}),
    "zero2": (Mesh(dp_shard=4), {"strategy": "zero2"}),
    "fsdp": (Mesh(dp_shard=4), {"activation_checkpointing": "full"}),
    "hsdp": (Mesh(dp_replicate=2, dp_shard=2), {"strategy": "hsdp"}),
    "tp fsdp": (Mesh(dp_shard=2, tp=2), {"activation_checkpointing": "selective"}),
    "tp ddp": (Mesh(dp_replicate=2, tp=2), {}),
    "cp": (Mesh(cp=4), {}),
    "cp fsdp": (Mesh(dp_shard=2, cp=2), {}),
    "cp, ring": (Mesh(cp=4), {"context_exchange": "ring"}),
    "cp fsdp, ring": (Mesh(dp_shard=2, cp=2), {"context_exchange": "ring"}),
    "cp tp": (Mesh(cp=2, tp=2), {}),
    "cp tp, ring": (Mesh(cp=2, tp=2), {"context_exchange": "ring"}),
    "ep": (Mesh(dp_shard=4, ep=2), {"experts": True}),
    "ep hsdp": (Mesh(dp_replicate=2, dp_shard=2, ep=2), {"experts": True}),
    **{f"pp fsdp, {name}": (Mesh(pp=2, dp_shard=2), {"schedule": name}) for name in list(BLOCKS)[:3]},
    "pp ep, gpipe": (Mesh(pp=2, dp_shard=2, ep=2), {"schedule": "gpipe", "experts": True}),
    "pp ep, interleaved": (Mesh(pp=2, dp_shard=2, ep=2), {"schedule": "interleaved", "experts": True}),
    "pp cp, gpipe": (Mesh(pp=2, cp=2), {"schedule": "gpipe"}),
    "pp cp, zero_bubble": (Mesh(pp=2, cp=2), {"schedule": "zero_bubble"}),
    "pp cp, ring": (Mesh(pp=2, cp=2), {"schedule": "1f1b", "context_exchange": "ring"}),
    **{f"pp ddp, {name}": (Mesh(pp=2, dp_replicate=2), {"schedule": name}) for name in BLOCKS},
    **{f"pp tp, {name}": (Mesh(pp=2, tp=2), {"schedule": name}) for name in BLOCKS},
    # classes of machines, of which the second has 3 of 8 samples
    "tp fsdp, groups": (Mesh(dp_shard=2, tp=2), {"groups": True, "strategy": "zero2"}),
    "cp fsdp, groups": (Mesh(dp_shard=2, cp=2), {"groups": True, "strategy": "zero2"}),
    **{
        f"pp ddp, {name}, groups": (Mesh(pp=2, dp_replicate=2), {"groups": True, "schedule": name})
        for name in ("1f1b", "zero_bubble")
    },
    "pp fsdp, groups": (
        Mesh(pp=2, dp_shard=2), {"groups": True, "schedule": "1f1b", "strategy": "zero2"}
    ),
    # 4 samples and 2 of the ranks that send each other rows
    "ep, groups": (Mesh(dp_shard=4, ep=2), {"groups": True, "experts": True, "strategy": "zero2"}),
    "ep hsdp, groups": (
        Mesh(dp_replicate=2, dp_shard=2, ep=2), {"groups": True, "experts": True, "strategy": "zero2"}
    ),
}  # fmt: skip
EXPERTS = MoeConfig(
    **{**vars(plans.CONFIG), **SIZES}, num_experts=4, experts_per_token=2,
    num_shared_experts=1, balance_rate=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Samples:
    inputs_BT: Tensor
    targets_BT: Tensor

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return {"inputs": self.inputs_BT[index], "targets": self.targets_BT[index]}


_UNKNOWN = ("memory_bytes", "step_seconds", "usd_per_hour", "usd_per_million_tokens")


def group(num_workers: int, speed: float) -> GroupPlan:
    return GroupPlan(
        "class", 1, num_workers, speed, sequences=1, share_ratio=0.5, micro_batch=1,
        activation_checkpointing="none", **dict.fromkeys(_UNKNOWN),
    )  # fmt: skip


GROUPS = group(2, 1.25), group(2, 0.75)
UNEVEN = group(1, 1.5), group(1, 1.0), group(2, 0.75)


def of_one_step(
    rank: int,
    mesh: Mesh,
    *,
    num_layers: int,
    schedule: Any = None,
    experts: bool = False,
    groups: bool = False,
    **changes: Any,
) -> tuple[ParallelizedModel, World]:
    """The model, whose gradients are the mean of what its gradient ranks have of all targets' losses."""
    strategy = changes.pop("strategy", "fsdp" if mesh.dp_shard > 1 else "ddp")
    model = plans.model_plan(**SIZES, num_layers=num_layers)
    if groups:
        changes |= {
            "groups": UNEVEN if experts else GROUPS,
            "communication": "resident",
            "reshard_after_forward": False,
        }
    if experts:
        model = ModelPlan(Entry(MOE, asdict(EXPERTS) | {"num_layers": num_layers}), None, SEQ_LEN, ())
    plan = plans.train_plan(
        "", TOKENS, world_size=mesh.world_size, mesh=mesh, strategy=strategy, global_batch=SAMPLES,
        micro_batch=1, accumulation=SAMPLES // mesh.num_data_ranks, model=model,
        pipeline=PipelinePlan(schedule, BLOCKS[schedule]) if schedule else None, **changes,
    ).work  # fmt: skip
    assert isinstance(plan, TrainPlan)
    world = World(mesh, rank, torch.device("cpu"))
    built = models.build_model(plan.model, seed=1, device_type="cpu")
    parallel = parallelize(built, world, plan)
    tokens = torch.randint(256, (SAMPLES, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, :3] = -100
    loader = MicrobatchLoader.of(plan, Samples(tokens[:, :-1], targets), world, plan.micro_batch)
    loader.speeds = plan.speeds
    make_schedule(plan, parallel, world).forward_backward(loader.step(0))
    return parallel, world


def gradient_of(shard: LocalShard) -> Tensor:
    assert shard.parameter is not None
    assert shard.parameter.grad is not None, shard.name
    return local_part(shard.parameter.grad)


def part_of(whole: Tensor, shard: LocalShard, gradient: Tensor) -> Tensor:
    """Where the gradient is of the whole tensor, though this rank updates a part, the whole."""
    if shard.full_gradient:
        assert gradient.shape == whole.shape
        return whole
    for dim, (first, length) in enumerate(zip(shard.offset, gradient.shape, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole


def cross_entropy_sum(logits: Any, targets: Any, **of_others: Any) -> tuple[Tensor, Tensor]:
    """mlpipe's is in fp32, whatever the logits are."""
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return loss, (targets != -100).sum()


def worst(rank: int, alone: dict[Any, dict[str, Tensor]], mesh: Mesh, given: dict[str, Any]) -> float:
    """On any rank. Every value of every gradient is looked at by one, at the least. `alone`: gradients by the
    number of layers and whether it has experts."""
    num_layers = LAYERS["schedule" in given]
    parallel, world = of_one_step(rank, mesh, num_layers=num_layers, **given)
    expected = alone[num_layers, given.get("experts", False)]
    differences, seen = torch.zeros((), dtype=torch.float64), Counter[str]()
    for shard in (one for one in parallel.shards if one.is_trained and one.local.numel()):
        gradient, whole = gradient_of(shard), expected[shard.name]
        wanted = part_of(whole, shard, gradient)
        apart = (world.num_gradient_ranks * gradient - wanted).abs().max() / whole.abs().max()
        differences = torch.maximum(differences, apart)
        seen[shard.name] += gradient.numel()
    dist.all_reduce(differences, op=dist.ReduceOp.MAX)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, seen)
    both: Counter[str] = sum(everywhere, Counter())
    assert both.keys() == expected.keys(), given
    assert all(both[name] >= whole.numel() for name, whole in expected.items()), given
    return float(differences)


TOKENS = Path(sys.argv[-1])


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    Tensor.float = Tensor.double  # type: ignore[method-assign]
    torch.set_default_dtype(torch.float64)
    models.cross_entropy_sum = cross_entropy_sum  # type: ignore[attr-defined, assignment]
    alone = {}
    for num_layers, experts in itertools.product(LAYERS.values(), (False, True)):
        model, _ = of_one_step(0, Mesh(), num_layers=num_layers, experts=experts)
        gradients = {one.name: gradient_of(one) for one in model.shards if one.is_trained}
        alone[num_layers, experts] = gradients
    found = {name: worst(rank, alone, mesh, given) for name, (mesh, given) in MIXES.items()}
    if rank == 0:
        print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort at the interpreter's end


if __name__ == "__main__":
    main()
