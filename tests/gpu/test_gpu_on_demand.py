"""`communication: on_demand` on a GPU: several ranks on one, whose memory they map as they would map that of
others. What goes over NVLink is not tested here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from kit import plans
from kit.conversations import SEQ_LEN, packed, write_chat
from kit.on_gpu import figure, needs_gpu
from kit.weights import weights

from mlpipe._core.meshes import Strategy
from mlpipe.plan.data import DataPlan

pytestmark = needs_gpu
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
NUM_UNITS, NUMEL, PUSHES = 3, 4096, 20


def rank_of(rank: int, num_ranks: int, folder: str) -> None:
    """Publishes, reads, and adds at the same time as the others."""
    from mlpipe.train.parallel.peer_memory import PeerMemory

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks)
    device = torch.device("cuda", 0)
    memory = PeerMemory(rank, num_ranks, [NUMEL] * NUM_UNITS, None, device)
    shards = [torch.full((NUMEL,), 10.0 * rank + unit, device=device) for unit in range(NUM_UNITS)]
    for unit, shard in enumerate(shards):
        memory.publish(unit, shard)
    memory.connect()
    for unit in range(NUM_UNITS):
        into = torch.empty(num_ranks * NUMEL, device=device)
        memory.read(unit, into)
        wanted = torch.arange(num_ranks, device=device).repeat_interleave(NUMEL) * 10.0 + unit
        torch.testing.assert_close(into, wanted, rtol=0, atol=0)
    began = time.perf_counter()
    pushes = 0 if rank == 1 else PUSHES  # who has no microbatch adds nothing
    for _ in range(pushes):
        for unit in range(NUM_UNITS):
            gradients = torch.ones(num_ranks * NUMEL, device=device)
            memory.push(unit, gradients.mul_(rank + 1))
    memory.fence()
    if rank == 0:
        figure(
            f"on_demand_{num_ranks}_ranks_push",
            (time.perf_counter() - began) / PUSHES / NUM_UNITS * 1e3,
            "ms",
        )
    total = PUSHES * sum(other + 1 for other in range(num_ranks) if other != 1)
    for unit in range(NUM_UNITS):
        found = memory.gradients(unit)
        assert found is not None
        torch.testing.assert_close(found, torch.full_like(found, float(total)), rtol=0, atol=0)
    memory.fence()
    dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_all_that_is_added_at_once_is_there(num_ranks, tmp_path, monkeypatch):
    """A lost addition would be missing in a sum of whole numbers, which has no rounding."""
    monkeypatch.setenv(OVERLAPPING, "1")
    ranks = mp.spawn(rank_of, (num_ranks, str(tmp_path)), num_ranks, join=False)
    until = time.monotonic() + 90
    while not ranks.join(timeout=5):
        assert time.monotonic() < until, "ranks wait for each other after 90 s"


def test_who_waits_for_nobody_trains_the_same(tmp_path):
    """As collectives on CPUs: with microbatches of unequal number, also none, and in bf16 nearly."""
    data = write_chat(tmp_path / "chat")
    free = packed(data, "balanced")
    tokens = plans.write_tokens(tmp_path / "tokens")
    model = plans.model_plan(vocab_size=320, max_seq_len=SEQ_LEN)._replace(seq_len=SEQ_LEN)
    own: dict[str, Any] = {
        "device": "cuda", "argv": ("-m", "kit.one_gpu"), "env": {OVERLAPPING: "1"}
    }  # fmt: skip
    on_demand: dict[str, Any] = {"communication": "on_demand", "deterministic": False, "launch": own}
    ways: dict[str, tuple[Strategy, DataPlan, dict[str, Any]]] = {
        "cpu": ("fsdp", data, {}),
        "on_demand": ("fsdp", free, on_demand),
        "stays": ("zero2", free, on_demand),
        "few_cpu": ("fsdp", data, {"global_batch": 1}),  # samples, for two ranks
        "few": ("fsdp", free, {**on_demand, "global_batch": 1}),
    }
    common: dict[str, Any] = {"model": model, "global_batch": 8, "micro_batch": 1, "accumulation": 4}
    made = {
        name: plans.train_plan(
            tmp_path / "store", tokens, world_size=2, strategy=strategy,
            **{**common, "steps": 6, "every": 6, "run_id": name, "data": of, **changes},
        )
        for name, (strategy, of, changes) in ways.items()
    }  # fmt: skip
    for name, plan in made.items():
        began = time.monotonic()
        process = plans.start(plan, tmp_path / name, warm=False)
        try:
            assert process.wait(100) == 0, plans.log_of(tmp_path / name)
        finally:
            process.kill()
            process.wait(30)
        figure(f"on_demand_training_{name}", time.monotonic() - began, "s")
    found = {name: weights(tmp_path / "store", plan, Path(tmp_path / "out")) for name, plan in made.items()}
    for name, wanted in (("on_demand", "cpu"), ("stays", "cpu"), ("few", "few_cpu")):
        most = max(
            float((found[name][tensor].cpu() - value.cpu()).abs().max())
            for tensor, value in found[wanted].items()
        )
        figure(f"on_demand_{name}_off_by", most)
        assert most < 1e-4, f"{name}: weights differ by {most}"
