"""Ranks that share samples count once: what a World says, and a training that believes it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from kit import plans
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.session import meet
from mlpipe.train.world import World

pytestmark = pytest.mark.torch

SIZE = st.integers(1, 3)
MESHES = st.builds(Mesh, pp=SIZE, dp_replicate=SIZE, dp_shard=SIZE, cp=SIZE, tp=SIZE)
STEPS, BATCH, SEQ_LEN = 3, 9, 32  # 4 samples for one data rank, 5 for the other


def worlds(mesh: Mesh) -> list[World]:
    return [World(mesh, rank, torch.device("cpu")) for rank in range(mesh.world_size)]


@given(MESHES)
def test_one_rank_counts_each_part_of_the_batch(mesh: Mesh) -> None:
    parts = [(one.data_rank, one.coordinates["cp"]) for one in worlds(mesh) if one.holds_loss]
    assert len(parts) == len(set(parts)) == mesh.num_data_ranks * mesh.cp


@given(MESHES)
def test_joined_axes_number_the_ranks_of_all(mesh: Mesh) -> None:
    for one in worlds(mesh):
        assert one.place("pp+dp_replicate+dp_shard+cp+tp") == (one.rank, mesh.world_size)
        assert one.place("dp_replicate+dp_shard") == (one.data_rank, one.num_data_ranks)
        assert one.place("dp_replicate+dp_shard+cp")[1] == one.num_gradient_ranks
        assert one.replica("dp_shard+cp") == one.replica("dp_shard", "cp")


@given(MESHES, st.sets(st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"])))
def test_replicas_of_a_part_are_numbered_from_zero(mesh: Mesh, split: set[str]) -> None:
    """Of each pipeline stage, which has tensors of its own."""
    replicas: dict[tuple[int, ...], list[int]] = {}
    for world in worlds(mesh):
        index, number = world.replica(*split)
        split.add("pp")
        assert number == mesh.world_size // len(
            {tuple(w.coordinates[a] for a in split) for w in worlds(mesh)}
        )
        replicas.setdefault(tuple(world.coordinates[axis] for axis in split), []).append(index)
    assert all(sorted(held) == list(range(len(held))) for held in replicas.values())


@given(MESHES, st.sampled_from(["pp", "dp_replicate", "dp_shard", "cp", "tp"]))
def test_a_peer_stands_elsewhere_on_one_axis_only(mesh: Mesh, axis: str) -> None:
    everybody = worlds(mesh)
    for one in everybody:
        for coordinate in range(mesh.axes[axis]):
            assert everybody[one.peer(axis, coordinate)].coordinates == one.coordinates | {
                axis: coordinate
            } | ({"ep": coordinate % mesh.ep} if axis == "dp_shard" else {})


@given(MESHES)
def test_the_first_rank_that_holds_the_loss(mesh: Mesh) -> None:
    everybody = worlds(mesh)
    assert everybody[0].first_with_loss == next(one.rank for one in everybody if one.holds_loss)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Plan]]:
    """The same training on 4 ranks under several meshes. Data ranks have 4 and 5 samples, in 2 and 3
    microbatches."""
    folder = tmp_path_factory.mktemp("world")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(name: str, mesh: Mesh, micro_batch: int = 2, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, strategy="ddp", world_size=4, steps=STEPS, every=STEPS, run_id=name,
            mesh=mesh, global_batch=BATCH, micro_batch=micro_batch,
            model=plans.model_plan(num_kv_heads=4), **changes,
        )  # fmt: skip

    made = {
        "alone": plan("alone", Mesh(tp=4), BATCH),
        "replicated": plan("replicated", Mesh(dp_replicate=2, tp=2)),
        "optimizer sharded": plan("sliced", Mesh(dp_replicate=2, tp=2), shard_optimizer=True),
        "sharded": plan("sharded", Mesh(dp_shard=2, tp=2)),
    }
    plans.run_together(list(made.values()), folder / "runs")
    return folder / "store", made


@pytest.mark.parametrize("name", ["replicated", "optimizer sharded", "sharded"])
def test_loss_and_gradient_are_of_the_data_not_of_the_ranks(trained: Any, name: str) -> None:
    store, made = trained
    for field in ("loss", "grad_norm"):
        alone, found = (plans.by_step(store, made[run], field) for run in ("alone", name))
        assert len(found) == STEPS
        assert found == pytest.approx(alone, rel=1e-5), field


@pytest.mark.parametrize(
    ("name", "samples"),
    [("alone", [9, 0, 0, 0]), ("replicated", [4, 0, 5, 0]), ("sharded", [4, 0, 5, 0])],
)
def test_tokens_are_counted_once_as_measured(trained: Any, name: str, samples: list[int]) -> None:
    store, made = trained
    for rank, number in enumerate(samples):
        steps = [record for record in plans.records(store, made[name], rank) if record["kind"] == "step"]
        assert [step["tokens"] for step in steps] == [number * SEQ_LEN] * STEPS
        assert [step["target_tokens"] for step in steps] == [number * SEQ_LEN] * STEPS
        if rank == 0:
            rates = [step["tokens_per_second"] * step["seconds"] for step in steps]
            assert rates == pytest.approx([BATCH * SEQ_LEN] * STEPS)


@pytest.mark.parametrize("name", ["alone", "replicated", "optimizer sharded", "sharded"])
def test_a_checkpoint_has_each_value_once(trained: Any, name: str) -> None:
    store, made = trained
    latest = catalogue.latest(FolderStore(store), made[name].stage_key)
    assert latest is not None
    manifest = catalogue.load_manifest(FolderStore(store), latest.key)
    for tensor in manifest["tensors"].values():
        covered = sum(torch.Size(chunk["shape"]).numel() for chunk in tensor["chunks"])
        assert covered == torch.Size(tensor["shape"]).numel()


def test_every_group_waits_as_long_as_the_plan_does(monkeypatch, tmp_path):
    """One hour: gloo's own is half of that, NCCL's a sixth."""
    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        monkeypatch.setattr(distributed_c10d, name, getattr(distributed_c10d, name))
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "0"),
    ):
        monkeypatch.setenv(name, value)
    meet("gloo", timedelta(hours=1))
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_shard", "tp"))
        groups: list[Any] = [dist.group.WORLD, dist.new_group([0]), mesh["tp"].get_group()]
        groups.append(mesh["dp_shard", "tp"]._flatten("both").get_group())
        for group in groups:
            assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(hours=1)
        assert distributed_c10d._get_default_timeout("nccl") == timedelta(hours=1)
    finally:
        dist.destroy_process_group()
