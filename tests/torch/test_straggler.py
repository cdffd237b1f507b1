"""A rank that computes slower than the others shows as that rank, though all steps take equally long."""

from __future__ import annotations

from statistics import median

import pytest
from kit import plans

from mlpipe.plan.plan import Entry, ModelPlan

pytestmark = pytest.mark.torch
# More in each forward and in each backward; a busy machine adds less to one rank than to the other.
SECONDS = 0.3
SLOW = 1
MODEL = ModelPlan(Entry("kit.models:lame", {"seconds": SECONDS, "rank": SLOW}), None, 32, ())


def test_the_slow_rank_is_named(tmp_path):
    tokens = plans.write_tokens(tmp_path / "tokens")
    made = [
        plans.train_plan(
            tmp_path / "store",
            tokens,
            strategy=strategy,
            world_size=2,
            model=MODEL,
            run_id=strategy,
            steps=6,
        )
        for strategy in ("ddp", "zero1", "fsdp")
    ]
    plans.run_together(made, tmp_path / "run")
    for plan in made:
        steps = [
            [record for record in plans.records(tmp_path / "store", plan, rank) if record["kind"] == "step"]
            for rank in (0, SLOW)
        ]

        def typical(rank: int, field: str, steps: list = steps) -> float:
            return median(record[field] for record in steps[rank][2:])  # the first ones build what they need

        fast, slow = (typical(rank, "compute_seconds") for rank in (0, SLOW))
        assert fast > 0
        assert slow > fast + SECONDS, plan.run_id
        assert typical(0, "collective_seconds") > typical(SLOW, "collective_seconds") + SECONDS, plan.run_id
        for record in (*steps[0], *steps[1]):
            parts = ("data_seconds", "compute_seconds", "collective_seconds", "checkpoint_seconds")
            assert sum(record[part] for part in parts) <= record["seconds"] + 1e-9
