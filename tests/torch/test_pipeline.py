"""The axis pp: each schedule computes what one rank does, whatever lies around it, and goes on elsewhere."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from kit import plans

from mlpipe.plan.plan import Entry, Mesh, ModelPlan, PipelinePlan, Plan

pytestmark = pytest.mark.torch

CONFIG = replace(plans.CONFIG, num_layers=5, dim=32, ffn_dim=64)
STEPS = 4
BLOCKS = {"gpipe": (3, 2), "1f1b": (2, 3), "interleaved": (2, 1, 1, 1), "zero_bubble": (2, 3)}


def near(found: list[float], expected: list[float], relative: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for step, (a, b) in enumerate(zip(found, expected, strict=True), start=1):
        assert abs(a - b) <= relative * abs(b), f"step {step}: {a} against {b}"


def model(tied: bool = True) -> ModelPlan:
    config = replace(CONFIG, tied=tied)
    return ModelPlan(Entry("mlpipe.train.models.llama:build_model", asdict(config)), "test", 32, ())


def plan(folder: Path, mesh: Mesh, run_id: str, schedule: Any = None, **changes: Any) -> Plan:
    """Four microbatches of each data rank, with the model's head tied."""
    strategy = "fsdp" if mesh.dp_shard > 1 else "ddp" if mesh.dp_replicate > 1 else "single"
    tokens = plans.write_tokens(folder / "tokens") if not (folder / "tokens").exists() else folder / "tokens"
    given = {
        "mesh": mesh,
        "micro_batch": 16 // mesh.num_data_ranks // 4,
        "accumulation": 4,
        "model": model(),
        "pipeline": PipelinePlan(schedule, BLOCKS[schedule]) if schedule else None,
        **changes,
    }
    return plans.train_plan(
        folder / "store",
        tokens,
        strategy=strategy,
        world_size=mesh.world_size,
        steps=given.pop("steps", STEPS),
        every=given.pop("every", 2),
        run_id=run_id,
        attempt=given.pop("attempt", 1),
        **given,
    )
