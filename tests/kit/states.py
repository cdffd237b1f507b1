"""`python -m kit.states OUT`, of each rank: bytes of parameters, gradients and optimizer states on rank 0 of
real groups of 8 (if there are so many), 4, 2 and 1 ranks, and of torch's fake one of 64 to 1,024; and of
fake ones of 1,024 that share layers and stages of a larger model."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from kit.plans import model_plan, train_plan, write_tokens
from torch.testing._internal.distributed.fake_pg import FakeStore

from mlpipe._core.meshes import STRATEGIES
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.plan import Plan
from mlpipe.plan.updates import EmaPlan, OptimizerPlan
from mlpipe.train.freezing import freeze
from mlpipe.train.model import build_model
from mlpipe.train.optim.make import make_update
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.shards import LocalShard
from mlpipe.train.world import World

# Rows that nothing divides; ranks without a row where the ranks are many.
SHAPE = {"vocab_size": 250, "dim": 72, "ffn_dim": 100}
REAL, PRETENDED = (8, 4, 2, 1), (64, 256, 1024)


# of a width that 8 ranks share, and 128 a share of it
WIDE = {
    "vocab_size": 2000, "dim": 1024, "ffn_dim": 800, "num_heads": 8, "num_kv_heads": 8, "num_layers": 10,
    "tied": False,
}  # fmt: skip
STAGES = (1, 1, 1, 1, 1, 1, 2, 2)
MESHES = {
    "tp 8, dp_shard 128": Mesh(tp=8, dp_shard=128),
    "tp 8, dp_replicate 128": Mesh(tp=8, dp_replicate=128),
    "tp 8, cp 4, dp_shard 32": Mesh(tp=8, cp=4, dp_shard=32),
    "pp 8, dp_shard 128": Mesh(pp=8, dp_shard=128),
    "pp 8, dp_replicate 128": Mesh(pp=8, dp_replicate=128),
    "tp 8, pp 8, dp_shard 16": Mesh(tp=8, pp=8, dp_shard=16),
}

FREEZE = ("embed*", "layers.0.mlp.*", "layers.*.self_attn.k_proj.*")


def plan_of(tokens: Path, strategy: Any, world_size: int) -> Plan:
    if strategy == "single":
        world_size = 1
    plan = train_plan("unused", tokens, strategy=strategy, world_size=world_size)
    train = cast(Any, plan.work)
    build = Entry(train.model.build.entry, {**train.model.build.args, **SHAPE})
    return replace(plan, work=train._replace(model=train.model._replace(build=build)))


def fits(strategy: str, world_size: int) -> bool:
    return {"single": world_size == 1, "hsdp": world_size >= 4}.get(strategy, world_size > 1)


def measure(plan: Plan, *, reduces: bool, frozen: tuple[str, ...] = ()) -> dict[str, Any]:
    train = cast(Any, plan.work)
    built = build_model(train.model, seed=1, device_type="cpu")
    if frozen:
        freeze(built.model, frozen)
    world = World(train.mesh, dist.get_rank(), torch.device("cpu"))
    parallel = parallelize(built, world, train)
    update = make_update(train.optimizer, parallel.shards)
    inputs = torch.zeros((1, 8), dtype=torch.int64)
    batch = {"inputs": inputs, "targets": inputs}
    with parallel.gradient_sync(reduces):
        if train.mesh.pp > 1:
            _backward_through_stage(parallel, batch, train.mesh)
        else:
            parallel.module(batch)[0].backward()

    def local(tensor: Any) -> torch.Tensor:
        return cast(torch.Tensor, tensor.to_local() if hasattr(tensor, "to_local") else tensor)

    parameters = [local(parameter) for parameter in parallel.module.parameters()]
    gradients = [local(p.grad) for p in parallel.module.parameters() if p.grad is not None]
    found: dict[str, Any] = {
        "parameters": sum(tensor.nbytes for tensor in parameters),
        "gradients": sum(tensor.nbytes for tensor in gradients),
        "optimizer": sum(item.local.nbytes for item in update.state()),
    }
    if train.mesh.tp * train.mesh.pp == 1:  # with which not every optimizer goes
        found["by name"] = {name: states_of(name, parallel.shards) for name in OPTIMIZERS}
    return found


def _backward_through_stage(parallel: ParallelizedModel, batch: dict[str, torch.Tensor], mesh: Mesh) -> None:
    (stage,) = cast(Any, parallel.built.module).parts
    shape = (8 // mesh.tp, WIDE["dim"]) if mesh.tp > 1 else (1, 8, WIDE["dim"])
    received = torch.zeros(shape, requires_grad=True) if stage else None
    output = parallel.module(batch, stage, received)
    (output[0] if stage == mesh.pp - 1 else output.sum()).backward()


def on_meshes(tokens: Path) -> list[list[Any]]:
    """Of the first rank of each stage, which has the most."""
    found = []
    for name, mesh in MESHES.items():
        for stage in sorted({0, 1, mesh.pp - 1} & set(range(mesh.pp))):
            rank = stage * (mesh.world_size // mesh.pp)
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=mesh.world_size)
            strategy: Any = "fsdp" if mesh.dp_shard > 1 else "zero1"
            pipeline = PipelinePlan("1f1b", STAGES) if mesh.pp > 1 else None
            plan = train_plan(
                "unused", tokens, strategy=strategy, world_size=mesh.world_size, mesh=mesh,
                model=model_plan(**WIDE), pipeline=pipeline, global_batch=1024, micro_batch=1,
            )  # fmt: skip
            # as below; stages leave it out themselves
            reduces = mesh.dp_shard > 1 or mesh.pp > 1
            found.append([name, stage, measure(plan, reduces=reduces)])
            dist.destroy_process_group()
    return found


def states_of(name: str, shards: list[LocalShard]) -> int:
    """Bytes that this optimizer keeps, with an average of the weights."""
    arguments = OPTIMIZERS[name].arguments.items()
    args = {key: list(a.default) if isinstance(a.default, tuple) else a.default for key, a in arguments}
    plan = OptimizerPlan(name, None, args, 0, 1e-3, 1.0, "constant", 0, 0, 0.0)
    return sum(item.local.nbytes for item in make_update(plan, shards, EmaPlan(0.9)).state())


def main() -> None:
    rank = int(os.environ["RANK"])
    folder = Path(sys.argv[1])
    tokens = folder / f"tokens-{rank}"
    write_tokens(tokens, num_tokens=1000)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = dist.TCPStore(host, port, is_master=rank == 0, timeout=timedelta(minutes=2))  # type: ignore[attr-defined]
    found: list[list[Any]] = []
    for kind, sizes in (("real", REAL), ("fake", PRETENDED)):
        for world_size in sizes:
            if rank >= (world_size if kind == "real" else 1):
                continue
            if kind == "real" and world_size > int(os.environ["WORLD_SIZE"]):
                continue
            if kind == "real":
                store = dist.PrefixStore(f"w{world_size}", shared)  # type: ignore[attr-defined]
                dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
            else:
                dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
            for strategy in [name for name in STRATEGIES if fits(name, world_size)]:
                plan = plan_of(tokens, strategy, world_size)
                # DDP's reducer wants a result, which the fake group does not give; gradients are whole anyway
                reduces = kind == "real" or strategy not in ("ddp", "zero1")
                found.append([kind, strategy, world_size, measure(plan, reduces=reduces)])
                if kind == "real" and world_size == 4:
                    measured = measure(plan, reduces=reduces, frozen=FREEZE)
                    found.append(["frozen", strategy, world_size, measured])
            dist.destroy_process_group()
    if rank == 0:
        (folder / "states.json").write_text(json.dumps(found))
        (folder / "meshes.json").write_text(json.dumps(on_meshes(tokens)))


if __name__ == "__main__":
    main()
    os._exit(0)  # gloo's threads abort an interpreter that ends by itself once in about fifty
