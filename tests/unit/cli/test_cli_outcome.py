"""What a verb that waited for a run prints last: commands that work as they are printed."""

from __future__ import annotations

import dataclasses

import pytest
from kit.synthetic_run import stage_plan, stage_state, train_plan, write_run

from mlpipe.cli.outcome import summary
from mlpipe.plan.mesh import Mesh
from mlpipe.store.open import open_store
from mlpipe.store.runs import read_run

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("changes", "overrides", "expected"),
    [
        ({}, [], "--set stages.train.train.strategy=ddp"),
        (
            {"strategy": "ddp", "mesh": Mesh(dp_replicate=2)}, ["train.steps=5", "train.strategy=ddp"],
            "--set train.steps=5 --set stages.train.train.strategy=fsdp",
        ),
        (
            {}, ["train.steps=4", "train.args={a: b=1}", "train.steps=5"],  # a resume adds to them
            "--set 'train.args={a: b=1}' --set train.steps=5 --set stages.train.train.strategy=ddp",
        ),
        ({"mesh": Mesh(tp=2)}, [], None),
        ({"strategy": "fsdp", "mesh": Mesh()}, [], None),  # of one worker it was fsdp after fsdp
        ({"mesh": Mesh(dp_shard=2, ep=2)}, [], None),
        ({}, [f"a.k{number}=5" for number in range(5)], None),
    ],
)  # fmt: skip
def test_the_same_under_another_strategy(tmp_path, changes, overrides, expected):
    """Not where the mesh has axes whose workers share samples: a batch need not come out even without."""
    store = open_store(str(tmp_path))
    plan = stage_plan("next-1", "train", work=train_plan(5, **changes))
    store.put("runs/next-1/stages/train/attempt-1/plan.json", plan.to_json().encode())
    write_run(store, "next-1", {"train": dataclasses.replace(stage_state(), outcome={"step": 5})})
    run = read_run(store, "next-1")
    run = dataclasses.replace(run, meta={"spec": "a b.yaml", "set": overrides})
    shown = [line for line in summary(store, run, None).splitlines() if "another strategy" in line]
    command = f"  mlpipe run 'a b.yaml' --store {store.url} {expected}    # the same under another strategy"
    assert shown == ([command] if expected else [])


def test_models_are_shown_where_the_run_made_one(tmp_path):
    """Not after a promotion that only tried, nor without one."""
    store = open_store(str(tmp_path))
    trained = dataclasses.replace(stage_state(), outcome={"step": 5})
    made = {"model": "m", "version": 2}
    for name, more, shown in (("a", {}, False), ("b", {"message": "dry run"}, False), ("c", made, True)):
        promoted = dataclasses.replace(stage_state(), outcome=more)
        write_run(store, name, {"train": trained, "promote": promoted})
        assert ("mlpipe models list" in summary(store, read_run(store, name), None)) is shown
