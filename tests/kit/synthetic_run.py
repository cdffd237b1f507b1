"""A run in a store as a real one leaves it, without training anything: for readers of runs."""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlpipe.kinds.command.plan import CommandPlan
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import SCHEMA_VERSION, Launch, Plan
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.work import CheckpointPlan, StageWork, TrainPlan
from mlpipe.store.base import Store
from mlpipe.store.catalogue import commit, write_blob
from mlpipe.store.runs import Lease, StageState, create_run, update_run

BEGIN = 1_795_000_000.0  # some day in November 2026
_SECONDS_A_STEP = 0.36


@dataclass(frozen=True)
class Life:
    """One start of the workers: from after `first` on to `last`, in the given attempt and restart."""

    attempt: int
    restart: int
    first: int
    last: int
    strategy: str = "fsdp"
    num_ranks: int = 2


def train_plan(steps: int, num_ranks: int = 2, **changes: Any) -> TrainPlan:
    plan = TrainPlan(
        model=ModelPlan(Entry("mlpipe.train.models.llama:build", {}), "llama-2m", seq_len=256, blocks=()),
        data=DataPlan(tokens="/data/corpus", dataset=None, digest=None),
        optimizer=OptimizerPlan(
            "adamw", None, {}, 8, 1e-3, 1.0, "cosine", 20, decay_steps=0, min_lr_ratio=0.1
        ),
        checkpoint=CheckpointPlan(every_steps=100, every_seconds=None, keep=3, asynchronous=True),
        steps=steps,
        global_batch=16,
        micro_batch=4,
        accumulation=max(1, 4 // num_ranks),
        strategy="fsdp",
        mesh=Mesh(dp_shard=num_ranks),
        reason="the model and its optimizer state fit twice into 15.6 GiB, and sharding costs nothing here",
        precision="bf16",
        activation_checkpointing="none",
        compile="off",
        deterministic=False,
        seed=17,
        hang_timeout_seconds=300.0,
        num_flops_per_token=1.21e7,
        peak_flops=1.9e11,
        peak_name="measured matmul peak",
        resume=True,
    )
    return plan._replace(**changes)


def stage_plan(run_id: str, stage: str, attempt: int = 1, *, work: StageWork) -> Plan:
    launch = Launch(1, 2, 3, "cpu", (), {}, None, 30.0, 0)
    head = (SCHEMA_VERSION, run_id, run_id.partition("-")[0], stage, attempt, "runs", "0" * 64, "1" * 64)
    return Plan(*head, launch, work)


def step_record(step: int, rank: int, num_ranks: int, rng: random.Random) -> dict[str, Any]:
    """Without `v`, `kind`, `rank`: a plausible step of a small model on two cores."""
    seconds = _SECONDS_A_STEP * rng.uniform(0.96, 1.08) * (1.35 if step % 100 == 0 else 1.0)
    data, stall = 0.004 + 0.003 * rng.random(), 0.09 if step % 100 == 0 else 0.0
    collective = seconds * (0.1 + 0.05 * rng.random()) * (1.0 if rank else 1.3)
    compute = (seconds - data - stall - collective) * 0.97
    rate = 4096 / seconds
    return {
        "step": step,
        "loss": 2.2 + 6.9 * math.exp(-step / 45) + 0.9 * math.exp(-step / 400) + rng.gauss(0, 0.04),
        "lr": 1e-3 * min(1, step / 20),
        "grad_norm": 0.6 + 2.5 * math.exp(-step / 30) + abs(rng.gauss(0, 0.12)),
        "tokens": 4096 // num_ranks,
        "seconds": seconds,
        "data_seconds": data,
        "compute_seconds": compute,
        "collective_seconds": collective,
        "checkpoint_seconds": stall,
        "tokens_per_second": rate if rank == 0 else None,
        "mfu_ratio": rate * 1.21e7 / (num_ranks * 1.9e11) if rank == 0 else None,
        "memory_bytes": int(5.5e8 + 4e7 * rank + 3e7 * (1 - math.exp(-step / 8))),
    }


def life_records(
    life: Life,
    rank: int,
    *,
    steps: int,
    run_id: str = "synthetic",
    every: int = 100,
    overrides: dict[int, dict[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """What one rank writes in one life. `overrides`: fields of step records, by step."""
    rng = random.Random(f"{life}{rank}")
    now = BEGIN + 600 * life.attempt + 120 * life.restart + _SECONDS_A_STEP * life.first
    head = {"v": 1, "rank": rank, "restart": life.restart}
    resumed = checkpoint_key(life.first, 1, run_id) if life.first else None
    out: list[dict[str, Any]] = [
        {
            **head, "kind": "start", "time": now, "world_size": life.num_ranks, "strategy": life.strategy,
            "mesh": f"dp_shard={life.num_ranks}", "device": "cpu", "num_params": 1_836_160,
            "num_flops_per_token": 1.21e7, "flops_convention": "6 N + 12 L H Q T a token (torchtitan), no"
            " causal discount, no recomputation", "peak_flops": 1.9e11, "peak_name": "measured matmul peak",
            "start_step": life.first, "resumed_from": resumed, "steps": steps, "seq_len": 256,
            "global_batch": 16, "precision": "bf16", "torch": "2.15.0+cpu", "host": "build-17",
            "pid": 4000 + rank, "metrics_port": 9400 + rank, "seconds_since_spawn": 2.1,
        }
    ]  # fmt: skip
    for step in range(life.first + 1, life.last + 1):
        record = {**head, "kind": "step", **step_record(step, rank, life.num_ranks, rng)}
        now += record["seconds"]
        out.append({**record, "time": now, **(overrides or {}).get(step, {})})
        if step % every == 0:
            saved = {"step": step, "key": checkpoint_key(step, life.attempt, run_id), "bytes": 11_000_000}
            took = {"stall_seconds": 0.09, "save_seconds": 0.8 if rank == 0 else None}
            out.append({**head, "kind": "checkpoint", "time": now, **saved, **took})
    return out


def checkpoint_key(step: int, attempt: int, run_id: str = "synthetic", stage: str = "train") -> str:
    return f"runs/{run_id}/stages/{stage}/checkpoints/step-{step:09d}/{attempt}-{step:08x}"


def commit_checkpoint(store: Store, key: str, *, step: int, attempt: int, size_bytes: int = 4096) -> None:
    """A committed checkpoint with one tensor of zeros."""
    blob = write_blob(store, f"{key}/model-0", [bytes(size_bytes)])
    chunk = {"offset": [0], "shape": [size_bytes // 4], "blob": 0, "byte_offset": 0}
    tensor = {"dtype": "float32", "shape": [size_bytes // 4], "chunks": [chunk]}
    head = {"format": 1, "step": step, "attempt": attempt, "uuid": f"{step:08x}", "time": BEGIN + step}
    rest = {"code": {}, "scalars": {}, "tensors": {"model.weight": tensor}, "blobs": [blob]}
    if not commit(store, key, {**head, **rest}):
        raise ValueError(f"{key} exists already")


def write_records(store: Store, attempt_key: str, rank: int, records: Iterable[dict[str, Any]]) -> None:
    log = store.open_log(f"{attempt_key}/records/rank-{rank}.jsonl")
    head = ("v", "kind", "time", "rank", "restart")
    for record in records:
        line = {name: record[name] for name in head if name in record}
        log.write(json.dumps({**line, **record}).encode() + b"\n")
    log.close()


def write_train_stage(
    store: Store,
    run_id: str,
    lives: Sequence[Life],
    *,
    steps: int,
    every: int = 100,
    overrides: dict[int, dict[str, Any]] | None = None,
    outcome: dict[str, Any] | None = None,
    stage: str = "train",
    **plan: Any,
) -> None:
    """Records and plan of every attempt, and the last one's outcome."""
    for life in lives:
        key = f"runs/{run_id}/stages/{stage}/attempt-{life.attempt}"
        mesh = Mesh(dp_replicate=life.num_ranks) if life.strategy == "ddp" else Mesh(dp_shard=life.num_ranks)
        chosen = train_plan(steps, life.num_ranks, strategy=life.strategy, mesh=mesh, **plan)
        store.put(f"{key}/plan.json", stage_plan(run_id, stage, life.attempt, work=chosen).to_json().encode())
        for rank in range(life.num_ranks):
            write_records(
                store,
                key,
                rank,
                life_records(life, rank, steps=steps, run_id=run_id, every=every, overrides=overrides),
            )
    if outcome is not None:
        store.put(f"{key}/outcome.json", json.dumps(outcome).encode())


def write_run(
    store: Store, run_id: str, states: dict[str, StageState], pipeline: str = "version: 1\n", **fields: Any
) -> None:
    """run.json with the given stages; `fields` of RunState besides (state, message)."""
    meta = {"pipeline": run_id.partition("-")[0], "git commit": "4f1c2d9"}
    create_run(store, run_id, pipeline, "0" * 64, list(states), "local", meta)
    driver = Lease("driver", "elsewhere", 1, time.time() + 3000)
    changed = {"state": "done", "created": BEGIN, "driver": driver, **fields, "stages": states}
    update_run(store, run_id, lambda run: replace(run, state="running"))
    update_run(store, run_id, lambda run: replace(run, **changed))


def stage_state(
    state: Any = "done", *, attempt: int = 1, begin: float = 0.0, seconds: float = 60.0
) -> StageState:
    return StageState(
        state, attempt, "", BEGIN + begin, BEGIN + begin + seconds, {"done": 0, "failed": 3}.get(state)
    )


def write_quickstart(store: Store, run_id: str = "quickstart-20261118-100000-ab12") -> None:
    """A whole pipeline that went well: corpus, train (one crash, one resume), evaluate."""
    key = f"runs/{run_id}/stages"
    command = CommandPlan(("mlpipe-corpus", "--out", "{{output}}"))
    store.put(
        f"{key}/corpus/attempt-1/plan.json", stage_plan(run_id, "corpus", work=command).to_json().encode()
    )
    lives = [Life(1, 0, 0, 263), Life(1, 1, 200, 340), Life(2, 0, 300, 400, "ddp", 4)]
    write_train_stage(
        store,
        run_id,
        lives,
        steps=400,
        outcome={"outcome": "done", "step": 400, "restarts": 1, "exit_code": 0},
    )
    for step, attempt in ((200, 1), (300, 1), (400, 2)):
        commit_checkpoint(store, checkpoint_key(step, attempt, run_id), step=step, attempt=attempt)
    log = store.open_log(f"{key}/train/attempt-1/events.jsonl")
    for event in (
        {"kind": "spawn", "time": BEGIN + 600, "message": "2 workers started"},
        {"kind": "restart", "time": BEGIN + 700, "message": "rank 1 was killed by signal 9; restart 1 of 3"},
        {"kind": "signal", "time": BEGIN + 760, "message": "SIGTERM: saving and stopping"},
    ):
        log.write(json.dumps({"v": 1, "rank": -1, "restart": 0, **event}).encode() + b"\n")
    log.close()
    evaluate = EvaluatePlan(
        "train",
        train_plan(400),
        DataPlan("/data/corpus", None, None),
        100_000,
        "val_bits_per_byte < 2.6",
        "def ",
        64,
    )
    plan = stage_plan(run_id, "evaluate", work=evaluate)
    store.put(f"{key}/evaluate/attempt-1/plan.json", plan.to_json().encode())
    metrics = {"val_loss": 2.513, "val_perplexity": 12.34, "val_bits_per_byte": 1.42, "num_tokens": 98_304}
    sample = "def __init__(self, name, value=None):\n    self.name = name\n    return <self.value> & 'more'\n"
    outcome = {"outcome": "done", "metrics": metrics, "passed": True, "sample": sample, "exit_code": 0}
    store.put(f"{key}/evaluate/attempt-1/outcome.json", json.dumps(outcome).encode())
    write_run(
        store,
        run_id,
        {
            "corpus": stage_state(begin=0, seconds=21),
            "train": stage_state(attempt=2, begin=21, seconds=163),
            "evaluate": stage_state(begin=184, seconds=9),
        },
    )
