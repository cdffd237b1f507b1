"""The memory probe before a long run: it refuses or steps down by what was measured, and leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from kit.plans import losses, run_together, train_plan, write_tokens

from mlpipe._core.errors import TrainError
from mlpipe._core.meshes import Strategy
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.plan import Plan
from mlpipe.plan.work import Prediction, TrainPlan
from mlpipe.train import memory_probe
from mlpipe.train.data.microbatch import Microbatch
from mlpipe.train.memory_probe import _peak_bytes, fitting_plan, is_due
from mlpipe.train.model import build_model
from mlpipe.train.optim.make import make_update
from mlpipe.train.parallel.apply import parallelize
from mlpipe.train.schedules.accumulate import Accumulate
from mlpipe.train.world import World

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
MIB = 2**20


def wide(tmp_path: Path, **changes: Any) -> TrainPlan:
    """Logits of 32 x 64 x 8,192: 128 MiB with their gradient, a quarter of it for a quarter of the batch."""
    write_tokens(tmp_path, num_tokens=100)
    plan = train_plan("unused", tmp_path, strategy="single", world_size=1, micro_batch=32)
    train = cast(TrainPlan, plan.work)
    args = {**train.model.build.args, "vocab_size": 8192}
    model = train.model._replace(build=Entry(train.model.build.entry, args))
    return train._replace(model=model, accumulation=1, **changes)


def test_it_steps_down_or_refuses(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two that wait for each other are slow on a busy machine
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        plan = wide(tmp_path, memory_bytes=2**50, smaller_micro_batches=(8, 2))
        built = build_model(plan.model, seed=1, device_type="cpu")
        world = World(plan.mesh, 0, CPU)
        model = parallelize(built, world, plan)
        update = make_update(plan.optimizer, model.shards)
        update.state()
        before = [item.local.clone() for item in model.shards]

        def probe(plan: TrainPlan) -> TrainPlan:
            return fitting_plan(plan, model, Accumulate(model, world), step, CPU)

        def step(size: int) -> list[Microbatch]:
            ids = torch.zeros((size, 64), dtype=torch.int64)
            return [Microbatch({"inputs": ids, "targets": ids}, ids.numel())]

        assert probe(plan) == plan
        most = _peak_bytes(CPU)
        small = plan._replace(memory_bytes=most - 40 * MIB)
        stepped = probe(small)
        assert (stepped.micro_batch, stepped.accumulation) == (8, 4)
        assert stepped.smaller_micro_batches == (2,)
        told = Prediction(50 * MIB, 1.0, 1.0, 1.0)
        tiny = plan._replace(memory_bytes=60 * MIB, smaller_micro_batches=(), predicted=told)
        with pytest.raises(
            TrainError, match=r"micro-batch size 32 needs .* [MG]iB of 60.0 MiB, the plan said 50.0"
        ) as caught:
            probe(tiny)
        assert caught.value.kind == "input"
        assert all(torch.equal(was, item.local) for was, item in zip(before, model.shards, strict=True))
        assert all(parameter.grad is None for parameter in model.module.parameters())
        assert all(not item.local.any() for item in update.state())
    finally:
        torch.set_num_threads(threads)
        dist.destroy_process_group()


@pytest.mark.parametrize(("pp", "num_run"), [(1, 2), (2, 8)])
def test_a_pipeline_is_probed_with_all_that_it_holds(
    pp: int, num_run: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def needs(model: Any, schedule: Any, batches: list[Any], device: Any) -> float:
        seen.append(len(batches))
        return 0.0

    monkeypatch.setattr(memory_probe, "_needs", needs)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: None)
    plan = wide(tmp_path, memory_bytes=1, mesh=Mesh(pp=pp))
    nothing: Any = None
    fitting_plan(plan, nothing, nothing, lambda size: [nothing] * 8, CPU)
    assert seen == [num_run]


def test_when_it_is_due(tmp_path: Path) -> None:
    plan = wide(tmp_path)
    assert not is_due(plan, CPU)
    known = plan._replace(memory_bytes=100)
    assert is_due(known, CPU)
    assert is_due(known._replace(predicted=Prediction(51, 1.0, 1.0, 1.0)), CPU)
    assert not is_due(known._replace(predicted=Prediction(50, 1.0, 1.0, 1.0)), CPU)


def test_losses_are_the_same_bit_for_bit(tmp_path: Path) -> None:
    tokens, store = write_tokens(tmp_path / "tokens"), tmp_path / "store"

    def plan(strategy: Strategy, name: str, **changes: Any) -> Plan:
        return train_plan(store, tokens, strategy=strategy, steps=4, run_id=f"{strategy}-{name}", **changes)

    pairs = [(plan(s, "cold"), plan(s, "warm", memory_bytes=2**50)) for s in ("ddp", "fsdp")]
    run_together([one for pair in pairs for one in pair], tmp_path / "scratch")
    for cold, warm in pairs:
        assert len(losses(store, cold)) == 4
        assert losses(store, cold) == losses(store, warm)
