"""Ranks that wait for each other less often compute the same training."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import plans
from kit.conversations import SEQ_LEN, packed, write_chat
from kit.weights import weights

from mlpipe._core.errors import TrainError
from mlpipe._core.meshes import Strategy
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.updates import CompressPlan
from mlpipe.plan.validation import ValidatePlan
from mlpipe.train.parallel import shared_memory
from mlpipe.train.room import FOLDER

pytestmark = pytest.mark.torch
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> DataPlan:
    return write_chat(tmp_path_factory.mktemp("chat"))


@pytest.mark.combines("dp_shard", "communication resident")
@pytest.mark.combines("dp_replicate", "communication resident")
@pytest.mark.combines("communication resident", "compress fp16")
@pytest.mark.combines("dp_shard", "communication on_demand")
@pytest.mark.combines("dp_replicate", "communication on_demand")
@pytest.mark.combines("validate", "communication on_demand")
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ways_to_wait_train_the_same(world_size, data, tmp_path):
    """Padded, packed and balanced, with equally many microbatches and not, also none: the same parameters,
    and validations. Copies that share nothing are those of nodes; what one saves goes on otherwise."""
    free, dense = packed(data, "balanced"), packed(data, "best_fit")
    resident: dict[str, Any] = {"communication": "resident", "reshard_after_forward": False}
    on_demand: dict[str, Any] = {"communication": "on_demand", "deterministic": False}
    validate = {"validate": ValidatePlan(every_steps=STEPS // 2, max_tokens=500, metrics=())}
    ways: dict[str, tuple[Strategy, DataPlan, dict[str, Any]]]
    if world_size == 2:
        ways = {
            "padded": ("fsdp", data, {}),
            "packed": ("fsdp", dense, {}),
            "copies": ("ddp", free, resident),
            "sent_small": ("ddp", free, {**resident, "compress": CompressPlan("fp16")}),
            "padded_on_demand": ("fsdp", data, on_demand),
            "stays": ("zero2", free, on_demand),
        }
    else:
        ways = {
            "padded": ("fsdp", data, validate),
            "resident": ("fsdp", free, resident),
            "on_demand": ("fsdp", free, {**on_demand, **validate}),
            "hsdp": ("hsdp", free, resident),
            "nodes": ("hsdp", free, {**on_demand, **validate}),
            "as_they_come": ("fsdp", dense, resident),
            "each": ("fsdp", dense, {**on_demand, "reduce_gradients": "every"}),
        }
        few = {"few": "padded", "few_on_demand": "on_demand", "few_nodes": "nodes", "few_rest": "resident"}
        for name, way in few.items():
            fewer = {"validate": None, "global_batch": 3}  # samples than ranks
            ways[name] = *ways[way][:2], {**ways[way][2], **fewer}
        ways["few_nodes"][2]["steps"] = STEPS // 2
        ways["few_rest"][2].update(run_id="few_nodes", attempt=2)
    model = plans.model_plan(vocab_size=320, max_seq_len=SEQ_LEN)._replace(seq_len=SEQ_LEN)
    common: dict[str, Any] = {"model": model, "global_batch": 8, "micro_batch": 1, "steps": STEPS}
    common |= {"accumulation": 8 // world_size, "every": STEPS}
    tokens = plans.write_tokens(tmp_path / "tokens")
    made = {
        name: plans.train_plan(
            tmp_path / "store",
            tokens,
            world_size=world_size,
            strategy=strategy,
            **{**common, "run_id": name, "data": of, **changes},
        )
        for name, (strategy, of, changes) in ways.items()
    }
    plans.run_together(list(made.values()), tmp_path / "ranks")
    if small := made.pop("sent_small", None):  # whose gradients are rounded before they are added up
        losses = [plans.losses(tmp_path / "store", plan) for plan in (made["padded"], small)]
        assert losses[1] == pytest.approx(losses[0], abs=1e-3)
    if made.pop("few_nodes", None) is not None:  # which "few_rest" goes on with
        [start] = [
            one for one in plans.records(tmp_path / "store", made["few_rest"]) if one["kind"] == "start"
        ]
        assert start["start_step"] == STEPS // 2
    expected = {name: weights(tmp_path / "store", plan, tmp_path / "out") for name, plan in made.items()}
    for name, found in expected.items():
        for tensor, value in expected["few" if name.startswith("few") else "padded"].items():
            torch.testing.assert_close(found[tensor], value, rtol=0, atol=1e-5, msg=f"{name} {tensor}")
    measured = [
        [
            one["metrics"]
            for one in plans.records(tmp_path / "store", made[name])
            if one["kind"] == "validation"
        ]
        for name, (_, _, changes) in ways.items()
        if changes.get("validate")
    ]
    assert [len(one) for one in measured] == ([2, 2, 2] if world_size == 4 else [])
    for others in measured[1:]:
        for found, value in zip(others, measured[0], strict=True):
            assert found == pytest.approx(value, abs=1e-5)


def left() -> list[Path]:
    """Of anybody's shared memory for weights."""
    return list(FOLDER.glob(f"{shared_memory.PREFIX}*"))


def test_killed_within_a_step_it_goes_on_and_leaves_nothing(tmp_path):
    """Rank 1 of two copies of two between its microbatches of step 4, once. Weights and gradients in shared
    memory have no names by then; and what a start leaves that was killed before, the next one removes."""
    (dead := FOLDER / f"{shared_memory.PREFIX}{os.getuid()}-dead").mkdir()
    (dead / "alive").touch()
    tokens = plans.write_tokens(tmp_path / "tokens")
    args = {"what": "kill", "at": 8, "rank": 1, "counter": str(tmp_path / "counter")}
    model = ModelPlan(Entry("kit.models:misbehaving", args), None, 32, ())
    never = model._replace(build=Entry("kit.models:misbehaving", {**args, "at": 10**9}))
    common: dict[str, Any] = {"steps": 6, "every": 2, "accumulation": 2}
    struck = plans.train_plan(
        tmp_path / "store", tokens, run_id="struck", model=model, launch={"max_restarts": 1}, micro_batch=2,
        strategy="hsdp", world_size=4, communication="on_demand", deterministic=False, **common,
    )  # fmt: skip
    whole = plans.train_plan(
        tmp_path / "store", tokens, run_id="whole", model=never, micro_batch=4, strategy="fsdp", **common
    )
    before = set(left())
    assert plans.launch(struck, tmp_path / "struck") == 0, plans.log_of(tmp_path / "struck")
    assert (tmp_path / "counter").read_text() == "x"
    assert not dead.exists()
    assert not set(left()) - before
    plans.run_together([whole], tmp_path / "whole")
    found, expected = (plans.losses(tmp_path / "store", plan) for plan in (struck, whole))
    assert found == pytest.approx(expected, abs=1e-5)


def test_what_is_in_use_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    first, alive = shared_memory._new_folder()
    second, other = shared_memory._new_folder()
    assert Path(first).exists()
    alive.close()
    third, last = shared_memory._new_folder()
    assert sorted(map(str, tmp_path.iterdir())) == sorted([second, third])
    other.close()
    last.close()
    monkeypatch.setattr(shared_memory, "_SWEEP_SECONDS", -1.0)
    handle = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(TrainError, match="has been locked for"):
        shared_memory._new_folder()
    os.close(handle)


def test_what_another_user_puts_there_is_not_opened(tmp_path, monkeypatch):
    """Opening a pipe waits for who writes into it."""
    nobody = os.getuid() + 1
    theirs = tmp_path / f"{shared_memory.PREFIX}{nobody}-x"
    theirs.mkdir()
    os.mkfifo(theirs / "alive")
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "getuid", lambda: nobody)
    _, made = shared_memory._new_folder()
    assert theirs.exists()
    made.close()


def test_no_rank_starts_where_shared_memory_is_too_small(tmp_path):
    plan = plans.train_plan(
        tmp_path / "store", plans.write_tokens(tmp_path / "tokens"), strategy="fsdp",
        communication="on_demand", shared_memory_bytes=10**18,
    )  # fmt: skip
    assert plans.launch(plan, tmp_path / "scratch") == 2
    log = plans.log_of(tmp_path / "scratch")
    assert "communication: on_demand needs 909494.7 TiB of shared memory" in log
    assert not (tmp_path / "scratch" / "torchrun.log").exists()
