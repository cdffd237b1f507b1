"""`python -m kit.any_mesh FOLDER`, the property of tests/torch/test_reshard_meshes.py: of any two meshes that
a pipeline file may name for a model and an optimizer, what ranks of the one save, those of the other load,
bit for bit. All ranks are built in this one process, one after the other, by the trainer's own techniques
over torch's fake process group; nothing is computed."""

from __future__ import annotations

import faulthandler
import itertools
import os
import sys
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from kit import plans
from torch.testing._internal.distributed.fake_pg import FakeStore

from mlpipe._core import meshes, pipelines
from mlpipe._core.optimizers import OPTIMIZERS
from mlpipe._core.presets import LLAMA, MOE, LlamaConfig, MoeConfig
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh, PipelinePlan
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.stages import split_blocks
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.work import TrainPlan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.checkpoint import Checkpointer, Coordination, SaveSettings
from mlpipe.train.model import build_model
from mlpipe.train.optim.make import make_update
from mlpipe.train.optim.update import Update
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.parallel.parallelized_model import ParallelizedModel
from mlpipe.train.reshard import load
from mlpipe.train.resuming import optimizer_scalars, stored
from mlpipe.train.shards import LocalShard
from mlpipe.train.world import World

MOST_RANKS, SEQ_LEN, STAGE = 4, 32, "runs/r/stages/train"
CHANGE_SECONDS = 240  # of one change, of which an idle machine does several a second
# what `tp` splits 4 ranks share evenly, and not much else; stages of five blocks are not equally long
DENSE = replace(
    plans.CONFIG, vocab_size=52, dim=40, num_layers=5, num_heads=4, num_kv_heads=4, ffn_dim=44,
    max_seq_len=SEQ_LEN,
)  # fmt: skip
EXPERTS = MoeConfig(
    **{**vars(DENSE), "num_layers": 4}, num_experts=4, experts_per_token=2, num_shared_experts=1,
    balance_rate=0.01,
)  # fmt: skip
MODELS: dict[str, LlamaConfig] = {
    "tied": DENSE, "untied": replace(DENSE, tied=False), "experts": EXPERTS
}  # fmt: skip


@dataclass(frozen=True)
class Ways:
    """How a model is laid out: a mesh, and what a plan says besides that changes who holds what."""

    mesh: Mesh
    shard_optimizer: bool = False
    schedule: pipelines.Schedule | None = None


def figures_of(model: str) -> dict[str, int]:
    found = {key: value for key, value in vars(MODELS[model]).items() if type(value) is int}
    return {"num_experts": 0, **found, "seq_len": SEQ_LEN}


def is_allowed(ways: Ways, model: str, optimizer: str) -> bool:
    """By `validate`'s rules."""
    sizes, figures = asdict(ways.mesh), figures_of(model)
    settings = {"optimizer": {"name": optimizer}}
    conflicts: list[Any] = [
        *meshes.conflicts(sizes, figures, own_model=False),
        *meshes.unsupported_mix(sizes, settings, figures),
    ]
    if ways.schedule is not None:
        conflicts += pipelines.conflicts(ways.schedule, None, sizes, figures, settings)
    if model == "experts" and OPTIMIZERS[optimizer].needs_blocks:
        return False
    return not conflicts


@cache
def all_ways(model: str, optimizer: str) -> tuple[Ways, ...]:
    sizes = range(1, MOST_RANKS + 1)
    found = []
    for values in itertools.product(sizes, repeat=len(meshes.AXES)):
        axes = dict(zip(meshes.AXES, values, strict=True))
        if axes["dp_shard"] % axes["ep"] or (mesh := Mesh(**axes)).world_size > MOST_RANKS:
            continue
        flags = (False, True) if mesh.dp_replicate > 1 == mesh.dp_shard else (False,)
        schedules: tuple[Any, ...] = ("1f1b", "interleaved") if mesh.pp > 1 else (None,)
        ways = (Ways(mesh, *rest) for rest in itertools.product(flags, schedules))
        found += [one for one in ways if is_allowed(one, model, optimizer)]
    return tuple(found)


def plan_of(model: str, ways: Ways) -> TrainPlan:
    config, mesh = MODELS[model], ways.mesh
    entry = MOE if isinstance(config, MoeConfig) else LLAMA
    pipeline = None
    if ways.schedule is not None:
        num_stages = mesh.pp * pipelines.stages_per_rank(ways.schedule)
        pipeline = PipelinePlan(ways.schedule, split_blocks(config.num_layers, num_stages, last=0.5))
    made = plans.train_plan(
        "", TOKENS, strategy="fsdp" if mesh.dp_shard > 1 else "ddp", world_size=mesh.world_size, mesh=mesh,
        model=ModelPlan(Entry(entry, asdict(config)), "test", SEQ_LEN, ()), pipeline=pipeline,
        shard_optimizer=ways.shard_optimizer,
    )  # fmt: skip
    assert isinstance(made.work, TrainPlan)
    return made.work


# A thread for each rank, by which DTensor tells equal meshes of several ranks apart in its caches.
THREADS = [ThreadPoolExecutor(1) for _ in range(MOST_RANKS)]


def built(plan: TrainPlan, rank: int) -> ParallelizedModel:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=plan.mesh.world_size)
    try:
        model = build_model(plan.model, seed=1, device_type="cpu")
        return parallelize(model, World(plan.mesh, rank, torch.device("cpu")), plan)
    finally:
        dist.destroy_process_group()


@cache
def first_weights(model: str) -> dict[str, torch.Tensor]:
    """Of one rank, which nothing splits."""
    alone = built(plan_of(model, Ways(Mesh())), 0)
    return {shard.name: shard.local for shard in alone.shards}


@cache
def ranks_of(model: str, ways: Ways) -> tuple[ParallelizedModel, ...]:
    """Each as the trainer makes it, with its first weights."""
    plan = plan_of(model, ways)
    found = [THREADS[rank].submit(built, plan, rank).result() for rank in range(plan.mesh.world_size)]
    first = first_weights(model)
    covered = dict.fromkeys(first, 0)
    for parallel in found:
        for shard in parallel.shards:
            assert torch.equal(shard.local, part_of(first[shard.name], shard)), (model, ways, shard.name)
            covered[shard.name] += shard.local.numel()
    assert all(covered[name] >= tensor.numel() for name, tensor in first.items()), (model, ways)
    return tuple(found)


def optimizer_plan(name: str) -> OptimizerPlan:
    arguments = OPTIMIZERS[name].arguments.items()
    args = {key: list(a.default) if isinstance(a.default, tuple) else a.default for key, a in arguments}
    return OptimizerPlan(name, None, args, 0, 1e-3, 1.0, "constant", 0, 0, 0.0)


def part_of(whole: torch.Tensor, shard: LocalShard) -> torch.Tensor:
    for dim, (first, length) in enumerate(zip(shard.offset, shard.local.shape, strict=True)):
        whole = whole.narrow(dim, first, length)
    return whole


def expected(shard: LocalShard) -> torch.Tensor:
    """This rank's part of what the tensor of this name is to be."""
    generator = torch.Generator().manual_seed(zlib.crc32(shard.name.encode()))
    if shard.local.is_floating_point():
        return part_of(torch.randn(shard.shape, generator=generator).to(shard.local.dtype), shard)
    return part_of(torch.randint(0, 100, shard.shape, generator=generator).to(shard.local.dtype), shard)


def each(parallels: tuple[ParallelizedModel, ...], updates: list[Update]) -> Iterator[list[LocalShard]]:
    for parallel, update in zip(parallels, updates, strict=True):
        yield stored(parallel, update)


def save(store: FolderStore, ranks: list[list[LocalShard]], scalars: Mapping[str, Any]) -> None:
    coordination, errors = dist.HashStore(), []  # type: ignore[attr-defined]
    checkpointers = [
        Checkpointer(
            store,
            SaveSettings(STAGE, attempt=1, restart=0, code_digest="", keep=1, asynchronous=True),
            Coordination(coordination, rank, len(ranks)),
            on_saved=lambda saved: errors.append(saved.error),
            while_waiting=lambda: None,
        )
        for rank in range(len(ranks))
    ]
    for checkpointer, shards in zip(checkpointers, ranks, strict=True):
        checkpointer.save(1, shards, {"optimizer": scalars})
    for checkpointer in checkpointers:
        checkpointer.finish()
    assert errors == [None] * len(ranks), errors


@st.composite
def changes(draw: st.DrawFn) -> tuple[str, str, Ways, Ways]:
    """Model, optimizer, and the ways before and afterwards."""
    model = draw(st.sampled_from(sorted(MODELS)))
    optimizer = draw(st.sampled_from(sorted(name for name in OPTIMIZERS if all_ways(model, name))))
    ways = st.sampled_from(all_ways(model, optimizer))
    return model, optimizer, draw(ways), draw(ways)


@settings(
    deadline=None, max_examples=50, database=None, derandomize=True, print_blob=False,
    phases=[Phase.generate], suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(changes())
@torch.no_grad()
def any_mesh_reads_what_any_other_wrote(change: tuple[str, str, Ways, Ways]) -> None:
    faulthandler.dump_traceback_later(CHANGE_SECONDS, exit=True)  # where every thread waits
    model, name, before, after = change
    plan = optimizer_plan(name)
    folder = FOLDER / str(len(list(FOLDER.iterdir())))
    store = FolderStore(folder)
    sources = ranks_of(model, before)
    updates = [make_update(plan, one.shards, everywhere=everywhere(model)) for one in sources]
    written = list(each(sources, updates))
    for shard in itertools.chain(*written):
        shard.local.copy_(expected(shard))
    save(store, written, optimizer_scalars(plan, [one.scalars() for one in updates]))
    last = catalogue.latest(store, STAGE)
    assert last is not None
    manifest = catalogue.load_manifest(store, last.key)
    targets = ranks_of(model, after)
    seen: set[str] = set()
    for parallel in targets:
        update = make_update(plan, parallel.shards, everywhere=everywhere(model))
        update.load_scalars(manifest["scalars"]["optimizer"]["scalars"])
        shards = stored(parallel, update)
        for shard in shards:
            shard.local.fill_(torch.nan if shard.local.is_floating_point() else 101)
        load(store, last.key, manifest, shards)
        for shard in shards:
            assert torch.equal(shard.local, expected(shard)), shard.name
        seen |= {shard.name for shard in shards}
    assert seen == manifest["tensors"].keys()
    SEEN.add((before.mesh, after.mesh))


@cache
def everywhere(model: str) -> dict[str, bool]:
    """All that is trained, and whether it is in a block."""
    (one,) = ranks_of(model, Ways(Mesh()))
    return {shard.name: shard.in_block for shard in one.shards if shard.parameter is not None}


FOLDER = Path(sys.argv[-1])
TOKENS = FOLDER / "tokens"
SEEN: set[tuple[Mesh, Mesh]] = set()


if __name__ == "__main__":
    plans.write_tokens(TOKENS, num_tokens=1000)
    any_mesh_reads_what_any_other_wrote()
    print(f"{len(SEEN)} different changes of mesh")
    sys.stdout.flush()
    os._exit(0)
