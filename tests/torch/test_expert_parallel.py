"""Expert parallelism computes what one rank computes, and leaves checkpoints that any mesh reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kit import plans

from mlpipe._core.presets import MOE, MoeConfig
from mlpipe.plan.plan import Entry, Mesh, ModelPlan, Plan

pytestmark = pytest.mark.torch

CONFIG = MoeConfig(
    **{**vars(plans.CONFIG), "dim": 32, "ffn_dim": 32},
    num_experts=4,
    experts_per_token=2,
    num_shared_experts=1,
    balance_rate=0.01,
)
MODEL = ModelPlan(Entry(MOE, dataclasses.asdict(CONFIG)), "test", 32, ())
STEPS = 6
TWO, FOUR = Mesh(dp_shard=2, ep=2), Mesh(dp_shard=4, ep=2)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[Any]]]:
    """`chain`: two steps on each of four ranks, one, and two."""
    folder: Path = tmp_path_factory.mktemp("experts")
    tokens = plans.write_tokens(folder / "tokens")

    def plan(run_id: str, mesh: Mesh, **changes: Any) -> Plan:
        return plans.train_plan(
            folder / "store", tokens, world_size=mesh.world_size, mesh=mesh, run_id=run_id,
            strategy="fsdp" if mesh.dp_shard > 1 else "single",
            **{"steps": STEPS, "every": 100, "model": MODEL} | changes,
        )  # fmt: skip

    chain = [
        plan("chain", mesh, steps=2 * number, attempt=number)
        for number, mesh in enumerate((FOUR, Mesh(), TWO), start=1)
    ]
    alone = plan("alone", Mesh())
    two = [
        plan("two", TWO),
        plan("full", TWO, activation_checkpointing="full", micro_batch=4, accumulation=2),
        plan("low", TWO, precision="bf16"),
    ]
    four = plan("four", FOUR)
    plans.run_together([four, chain[0]], folder / "four")
    plans.run_together([alone, chain[1]], folder / "one")
    plans.run_together([*two, chain[2]], folder / "two")
    fields = ("loss", "grad_norm", "expert_max_load_ratio")
    found = {
        one.run_id: {field: plans.by_step(folder / "store", one, field) for field in fields}
        for one in [alone, *two, four]
    }
    steps = [plans.by_step(folder / "store", one, "loss") for one in chain]
    return found | {"chain": {"loss": [loss for some in steps for loss in some]}}


@pytest.mark.parametrize("name", ["two", "full", "four"])
def test_losses_gradients_and_loads_are_those_of_one_rank(trained: Any, name: str) -> None:
    assert len(trained[name]["loss"]) == STEPS
    assert trained[name]["loss"] == pytest.approx(trained["alone"]["loss"], rel=1e-5)
    assert trained[name]["grad_norm"] == pytest.approx(trained["alone"]["grad_norm"], rel=1e-3)
    assert trained[name]["expert_max_load_ratio"] == trained["alone"]["expert_max_load_ratio"]


def test_a_checkpoint_goes_on_under_any_mesh(trained: Any) -> None:
    assert trained["chain"]["loss"] == pytest.approx(trained["alone"]["loss"], rel=1e-5)


def test_bf16_is_near(trained: Any) -> None:
    assert trained["low"]["loss"] == pytest.approx(trained["alone"]["loss"], rel=1e-2)
