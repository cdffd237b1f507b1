"""Tensor parallelism computes what one rank computes, and leaves checkpoints that any mesh reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plans

from mlpipe.plan.plan import Mesh, Plan
from mlpipe.store import catalogue
from mlpipe.store.folder import FolderStore
from mlpipe.train.reshard import load
from mlpipe.train.shards import LocalShard

pytestmark = pytest.mark.torch

STEPS = 8
CHAIN = (Mesh(tp=2), Mesh(dp_shard=2, tp=2), Mesh(), Mesh(dp_replicate=2, tp=2))  # two steps each
BASE: dict[str, Any] = {"model": plans.model_plan(tied=False)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Plan]]]:
    """Plans of a training by one rank, by two, and of one that goes on under another mesh every two steps."""
    folder = tmp_path_factory.mktemp("tensor")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run_id: str, mesh: Mesh, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id, every=100,
            strategy="fsdp" if mesh.dp_shard > 1 else "ddp", **{"steps": STEPS} | BASE | changes,
        )  # fmt: skip

    chain = [
        plan("chain", mesh, steps=2 * number, attempt=number) for number, mesh in enumerate(CHAIN, start=1)
    ]
    alone = plan("alone", Mesh())
    two = [
        plan("two", CHAIN[0]),
        plan("tied", CHAIN[0], model=plans.model_plan(), activation_checkpointing="full", micro_batch=4),
        plan("low", CHAIN[0], precision="bf16", activation_checkpointing="selective"),
    ]
    plans.run_together([alone, plan("tied-alone", Mesh(), model=plans.model_plan())], folder / "one")
    plans.run_together([*two, chain[0]], folder / "two")
    for number, one in enumerate(chain[1:], start=2):
        plans.run_together([one], folder / f"chain-{number}")
    found = {one.run_id: [one] for one in (alone, *two)}
    return folder / "store", found | {"chain": chain, "tied-alone": [plan("tied-alone", Mesh())]}


def losses(trained: Any, run: str) -> list[float]:
    store, made = trained
    return [loss for plan in made[run] for loss in plans.losses(store, plan)]


def weights(trained: Any, run: str) -> dict[str, torch.Tensor]:
    """All that the last checkpoint holds."""
    store, made = FolderStore(trained[0]), trained[1]
    latest = catalogue.latest(store, made[run][0].stage_key)
    assert latest is not None
    manifest = catalogue.load_manifest(store, latest.key)
    shards = [
        LocalShard(name, torch.full(one["shape"], torch.nan), tuple(one["shape"]), (0,) * len(one["shape"]))
        for name, one in manifest["tensors"].items()
    ]
    load(store, latest.key, manifest, shards)
    return {shard.name: shard.local for shard in shards}


@pytest.mark.parametrize(("run", "other"), [("two", "alone"), ("chain", "alone"), ("tied", "tied-alone")])
def test_losses_and_parameters_are_those_of_one_rank(trained: Any, run: str, other: str) -> None:
    """Also with recomputed blocks, in accumulated microbatches, and where the mesh changes on the way."""
    assert losses(trained, run) == pytest.approx(losses(trained, other), rel=1e-5)
    found, expected = weights(trained, run), weights(trained, other)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5, msg=name)


def test_bf16_means_the_same(trained: Any) -> None:
    assert losses(trained, "low") == pytest.approx(losses(trained, "alone"), rel=1e-2)
