"""A rank that computes slower than the others shows as that rank, though all steps take equally long."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
from kit import plans
from kit.weights import weights

from mlpipe._core.record_lines import parse
from mlpipe.observe.progress import live_line, summarize
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import PreflightPlan
from mlpipe.plan.work import GroupPlan
from mlpipe.train.slow_nodes import SLOW_FILE

pytestmark = pytest.mark.torch
# More in each forward and in each backward; a busy machine adds less to one rank than to the other.
SECONDS = 0.3
SLOW = 1
MODEL = ModelPlan(Entry("kit.models:lame", {"seconds": SECONDS, "rank": SLOW}), None, 32, ())

# One that is twice as fast as the other, which has less memory, and computes more again.
_OTHERS = {"sequences": 11, "share_ratio": 0.7, "memory_bytes": None, "step_seconds": None}
_PRICES = {"usd_per_hour": None, "usd_per_million_tokens": None}
GROUPS = (
    GroupPlan("fast", 1, 1, 1.3333, micro_batch=4, activation_checkpointing="none", **_OTHERS, **_PRICES),
    GroupPlan("slow", 1, 1, 0.66667, micro_batch=1, activation_checkpointing="full", **_OTHERS, **_PRICES),
)
SPLIT = {"blocks.*.up": "column", "blocks.*.down": "row"}
PREFLIGHT = PreflightPlan(slow_ratio=0.5, clock_seconds=3600.0, disk_bytes=1, store_bytes_per_second=1.0)


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


@pytest.mark.combines("dp_replicate", "stragglers move_load")
@pytest.mark.combines("dp_shard", "stragglers move_load")
@pytest.mark.combines("dp_replicate", "resources in groups")
@pytest.mark.combines("dp_shard", "resources in groups")
def test_load_moves_off_a_slow_rank_and_the_training_stays_the_same(tmp_path):
    """Rank 1 takes four times as long for a sample: it gets fewer of them, and is named. Losses and
    parameters are those of equal shares, also of a training that goes on in the middle, and each sample is
    computed once. So do machines of which the plan says how fast they are. A gang of machines that were
    checked names it as well, and moves nothing."""
    tokens = plans.write_tokens(tmp_path / "tokens")
    paced = ModelPlan(Entry("kit.models:paced", {"seconds": [0.01, 0.04]}), None, 32, ())
    even = ModelPlan(Entry("kit.models:paced", {"seconds": [0.0, 0.0]}), None, 32, ())
    common: dict[str, Any] = {"world_size": 2, "steps": 30, "every": 10, "micro_batch": 2, "accumulation": 4}
    moved: dict[str, Any] = {"moves_load": True, "communication": "resident", "deterministic": False}
    made = {
        "even": plans.train_plan(tmp_path / "store", tokens, run_id="even", model=even, **common),
        "ddp": plans.train_plan(tmp_path / "store", tokens, run_id="ddp", model=paced, **common, **moved),
        "groups": plans.train_plan(
            tmp_path / "store", tokens, run_id="groups", model=even, strategy="zero2", groups=GROUPS,
            **{**common, "communication": "resident", "reshard_after_forward": False},
        ),
        "groups of copies": plans.train_plan(
            tmp_path / "store", tokens, run_id="groups-of-copies", model=even, groups=GROUPS,
            **{**common, "communication": "resident"},
        ),
        "fsdp": plans.train_plan(
            tmp_path / "store", tokens, run_id="fsdp", model=paced, strategy="fsdp",
            **{**common, **moved, "reshard_after_forward": False, "steps": 20},
        ),
    }  # fmt: skip
    two_nodes = {"num_nodes": 2, "preflight": PREFLIGHT}
    made["watched"] = plans.train_plan(
        tmp_path / "store", tokens, run_id="watched", model=paced, launch=two_nodes, **common
    )
    work = made["fsdp"].work._replace(steps=30, resume=True)
    rest = replace(made["fsdp"], attempt=2, work=work)
    plans.run_together([*made.values(), rest], tmp_path / "run")
    expected = plans.losses(tmp_path / "store", made["even"])
    resumed = plans.losses(tmp_path / "store", made["fsdp"]) + plans.losses(tmp_path / "store", rest)
    others = (plans.losses(tmp_path / "store", made[name]) for name in ("ddp", "groups", "groups of copies"))
    for found in (resumed, *others):
        assert found == pytest.approx(expected, rel=1e-6)
    parameters = {
        name: weights(tmp_path / "store", plan, tmp_path / "out")
        for name, plan in (made | {"fsdp": rest}).items()
    }
    for name, found in parameters.items():
        for tensor, value in parameters["even"].items():
            most = 1e-5 if name.startswith("groups") else 1e-6
            torch.testing.assert_close(found[tensor], value, rtol=0, atol=most, msg=f"{name} {tensor}")
    for name in ("groups", "groups of copies"):
        first, second = (
            {
                one["tokens"]
                for one in plans.records(tmp_path / "store", made[name], rank)
                if one["kind"] == "step"
            }
            for rank in (0, 1)
        )
        assert (first, second) == ({11 * 32}, {5 * 32}), "from the first step on"
    for plan in (made["watched"], made["ddp"], made["fsdp"]):
        ranks = [
            [record for record in plans.records(tmp_path / "store", plan, rank) if record["kind"] == "step"]
            for rank in (0, SLOW)
        ]
        assert all(a["tokens"] + b["tokens"] == 16 * 32 for a, b in zip(*ranks, strict=True))
        assert ranks[SLOW][-1]["slowness_ratio"] > 1.2
        if plan is made["watched"]:
            assert {one["tokens"] for one in ranks[SLOW]} == {8 * 32}, "nothing moves"
            continue
        assert ranks[0][0]["share_ratio"] == ranks[SLOW][0]["share_ratio"] == 1
        assert ranks[SLOW][-1]["share_ratio"] < 0.9 < 1.1 < ranks[0][-1]["share_ratio"]
    assert ranks[0][-1].get("stragglers") is None, "for 20 steps nobody is slow for long"
    for name in ("ddp", "watched"):
        scratch = tmp_path / "run" / f"scratch-{list(made).index(name)}"
        told = json.loads((scratch / SLOW_FILE).read_text())
        assert list(told) == [socket.gethostname()], "for its launcher"
        assert told[socket.gethostname()] >= 1.2
        summary = summarize(map(parse, plans.records(tmp_path / "store", made[name])))
        assert list(summary["stragglers"]) == [str(SLOW)]
        assert f"slow: rank {SLOW} (" in live_line(summary, width=200)


@pytest.mark.combines("tp", "stragglers move_load")
def test_data_ranks_of_several_workers_have_the_share_of_their_class_or_of_the_slowest_of_them(tmp_path):
    """Two workers each. The first class has two thirds of each batch, or load moves off the second pair, of
    which one is slow: the losses are those of one process. Gradients, and other axes: test_gradients.py."""
    tokens = plans.write_tokens(tmp_path / "tokens")
    seconds = {1: [0.0], 4: [0.005, 0.005, 0.005, 0.02]}
    made = {}
    for num_ranks, mesh in ((1, Mesh()), (4, Mesh(dp_replicate=2, tp=2))):
        common: dict[str, Any] = {"world_size": num_ranks, "mesh": mesh, "every": 100, "deterministic": False}
        groups = tuple(one._replace(num_nodes=2, num_workers=2) for one in GROUPS)
        paced = ModelPlan(Entry("kit.models:paced", {"seconds": seconds[num_ranks]}), None, 32, (), SPLIT)
        if num_ranks > 1:
            common |= {"communication": "resident"}
        made[num_ranks] = [
            plans.train_plan(
                tmp_path / "store", tokens, run_id=f"mixed {num_ranks}", steps=4, **common,
                groups=groups if num_ranks > 1 else (),
            ),
            plans.train_plan(
                tmp_path / "store", tokens, run_id=f"moved {num_ranks}", steps=14, model=paced,
                moves_load=True, **{**common, "micro_batch": 2, "accumulation": 8 // mesh.num_data_ranks},
            ),
        ]  # fmt: skip
        plans.run_together(made[num_ranks], tmp_path / str(num_ranks))
    for alone, together in zip(*made.values(), strict=True):
        expected = plans.losses(tmp_path / "store", alone)
        assert plans.losses(tmp_path / "store", together) == pytest.approx(expected, rel=1e-5)
    mixed, moved = (
        [
            [one for one in plans.records(tmp_path / "store", plan, rank) if one["kind"] == "step"]
            for rank in range(4)
        ]
        for plan in made[4]
    )
    counted = [{one["tokens"] for one in steps} for steps in mixed]
    assert counted == [{11 * 32}, {0}, {5 * 32}, {0}], "of a class its first worker counts"
    assert [steps[0]["share_ratio"] for steps in moved] == [1, 1, 1, 1]
    first, second, third, last = (steps[-1]["share_ratio"] for steps in moved)
    assert first == second > 1.1 > 0.9 > third == last, "all workers of a data rank have its share"
    assert [steps[-1]["slowness_ratio"] > 1.2 for steps in moved] == [False, False, False, True]
