"""Small plans and token files for the torch ring, and the real launcher to run them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from array import array
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kit.servers import free_port
from kit.warm import Popen, of_plan

from mlpipe._core.meshes import Strategy
from mlpipe._core.presets import LlamaConfig
from mlpipe.kinds.evaluate.plan import EvaluatePlan
from mlpipe.plan.data import DataPlan
from mlpipe.plan.entry import Entry
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.model import ModelPlan
from mlpipe.plan.plan import Launch, Plan
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.updates import OptimizerPlan
from mlpipe.plan.work import CallbackPlan, CheckpointPlan, TrainPlan

CONFIG = LlamaConfig(
    vocab_size=256,
    dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_dim=176,
    max_seq_len=64,
    rope_theta=10_000.0,
    norm_eps=1e-5,
    tied=True,
)


def write_tokens(folder: Path, *, num_tokens: int = 60_000, vocab_size: int = 256) -> Path:
    """Token files with some structure (a noisy successor function), so that a model learns something."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(7)
    splits = {}
    for name, count in (("train", num_tokens), ("validation", num_tokens // 10)):
        tokens = array("H", [0])
        for _ in range(count - 1):
            tokens.append(
                (tokens[-1] * 5 + 17) % vocab_size if draw.random() < 0.8 else draw.randrange(vocab_size)
            )
        data = tokens.tobytes()
        (folder / f"{name}.bin").write_bytes(data)
        splits[name] = {
            "file": f"{name}.bin",
            "num_tokens": count,
            "num_bytes": count,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    manifest = {"format": 1, "dtype": "uint16", "vocab_size": vocab_size, "tokenizer": None, "splits": splits}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def mesh_of(strategy: Strategy, world_size: int) -> Mesh:
    if strategy in ("single", "ddp", "zero1"):
        return Mesh(dp_replicate=world_size)
    if strategy == "hsdp":
        return Mesh(dp_replicate=2, dp_shard=world_size // 2)
    return Mesh(dp_shard=world_size)


def model_plan(**fields: Any) -> ModelPlan:
    """Of CONFIG, but for `fields`."""
    build = Entry("mlpipe.train.models.llama:build_model", asdict(CONFIG) | fields)
    return ModelPlan(build=build, preset="test", seq_len=32, blocks=())


def train_plan(
    store: Path | str,
    tokens: Path,
    *,
    strategy: Strategy = "ddp",
    world_size: int = 2,
    steps: int = 20,
    every: int = 10,
    run_id: str = "run",
    attempt: int = 1,
    launch: dict[str, Any] | None = None,
    mesh: Mesh | None = None,
    **changes: Any,
) -> Plan:
    """A tiny Llama: 16 sequences of 32 tokens an update. `changes` are fields of TrainPlan."""
    mesh = mesh or mesh_of(strategy, world_size)
    train = TrainPlan(
        model=model_plan(),
        data=DataPlan(
            tokens=str(tokens),
            dataset=None,
            digest=hashlib.sha256((tokens / "manifest.json").read_bytes()).hexdigest(),
        ),
        optimizer=OptimizerPlan(
            name="adamw",
            entry=None,
            args={"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
            state_bytes_per_parameter=8,
            lr=1e-3,
            grad_clip=1.0,
            schedule="constant",
            warmup_steps=0,
            decay_steps=0,
            min_lr_ratio=0.1,
        ),
        checkpoint=CheckpointPlan(every_steps=every, every_seconds=None, keep=3, asynchronous=True),
        steps=steps,
        global_batch=16,
        micro_batch=16 // mesh.num_data_ranks,
        accumulation=1,
        strategy=strategy,
        mesh=mesh,
        reason="asked for",
        precision="fp32",
        activation_checkpointing="none",
        compile="off",
        deterministic=True,
        seed=1,
        hang_timeout_seconds=120.0,
        num_flops_per_token=1e6,
        peak_flops=1e11,
        peak_name="a round number for tests",
        resume=attempt > 1,
    )
    launch_plan = Launch(
        num_nodes=1,
        nproc_per_node=world_size,
        max_restarts=0,
        device="cpu",
        argv=("-m", "mlpipe.train.worker"),
        env={},
        timeout_seconds=None,
        shutdown_seconds=60.0,
        metrics_port=None,
    )
    return Plan(
        schema_version=1,
        run_id=run_id,
        pipeline="test",
        stage="train",
        attempt=attempt,
        store_url=str(store),
        spec_digest="0" * 64,
        code_digest="0" * 64,
        launch=launch_plan._replace(**(launch or {})),
        work=train._replace(**{**ORDER[strategy].FLAGS, **changes}),
    )


def evaluate_plan(trained: Plan, **changes: Any) -> Plan:
    """The evaluation of the train stage of `trained`."""
    training = trained.work.training
    part = EvaluatePlan(
        train_stage=trained.stage,
        train=training,
        data=training.data,
        max_tokens=100_000,
        gate=None,
        prompt=None,
        generate_tokens=0,
    )
    return replace(trained, stage="evaluate", attempt=1, work=part._replace(**changes))


def environment() -> dict[str, str]:
    """Of a launcher or a rank: the tests' own modules importable, no settings from outside. One thread a rank
    wherever, for results depend on it, bit for bit; the models are too small for a second to help."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MLPIPE_"))}
    env["OMP_NUM_THREADS"] = "1"
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), env.get("PYTHONPATH", "")])
    return env


def start(
    plan: Plan, scratch: Path, *, env: dict[str, str] | None = None, warm: bool = True
) -> subprocess.Popen[bytes]:
    """The real launcher in a session of its own; its output goes to `launcher.log` in the scratch folder.
    Unless it is `warm`, it and torchrun are new interpreters."""
    scratch.mkdir(parents=True, exist_ok=True)
    path = scratch / "plan.json"
    path.write_text(plan.to_json())
    argv = [sys.executable, "-P", "-m", plan.module, "--plan", str(path), "--scratch", str(scratch)]
    env = environment() if env is None else env
    with (scratch / "launcher.log").open("ab") as log:
        streams: Any = {"stdout": log, "stderr": log, "start_new_session": True}
        if not warm:
            return subprocess.Popen(argv, env=env, **streams)
        kind, env = of_plan(plan, env | {"KIT_WARM": "1"})
        return Popen(kind, argv, env=env, **streams)


def launch(plan: Plan, scratch: Path, *, timeout: float = 600.0) -> int:
    """Runs it to its end and returns the exit code; kills it and raises after `timeout` seconds."""
    process = start(plan, scratch)
    try:
        return process.wait(timeout)
    finally:
        process.kill()
        process.wait(300)


def dying(step: int = 5, every: int = 3) -> dict[str, Any]:
    """Changes of a plan: rank 1 is killed after `step`, and all ranks start once more from the checkpoint."""
    kill = CallbackPlan("kit.heard:Kills", {"rank": 1, "step": step}, "all")
    return {"callbacks": (kill,), "every": every, "launch": {"max_restarts": 1}}


def launch_dying(plan: Plan, store: Path, scratch: Path) -> None:
    """Of a plan with `dying`: it ends well, in its second start."""
    assert launch(plan, scratch) == 0, log_of(scratch)
    assert outcome(store, plan)["restarts"] == 1


def log_of(scratch: Path) -> str:
    return (scratch / "launcher.log").read_text(errors="replace")


def records(store: Path | str, plan: Plan, rank: int = 0) -> list[dict[str, Any]]:
    path = Path(store) / plan.attempt_key / "records" / f"rank-{rank}.jsonl"
    return lines(path.read_bytes()) if path.exists() else []


def lines(data: bytes) -> list[dict[str, Any]]:
    """Records as they stand in a file, but for torn lines."""
    found = []
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            found.append(json.loads(line[max(0, line.rfind(b'{"v":')) :]))
    return found


def losses(store: Path | str, plan: Plan) -> list[float]:
    """By step, of rank 0; the last record of a step counts."""
    return by_step(store, plan, "loss")


def by_step(store: Path | str, plan: Plan, field: str) -> list[float]:
    """That field of rank 0's steps; the last record of a step counts."""
    found = {record["step"]: record[field] for record in records(store, plan) if record["kind"] == "step"}
    return [found[step] for step in sorted(found)]


def outcome(store: Path | str, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(store) / plan.attempt_key / "outcome.json").read_text())
    return found


def run_together(
    plans: list[Plan],
    folder: Path,
    *,
    timeout: float = 600.0,
    resave: bool = False,
    may_fail: bool = False,
    worker: str = "kit.many",
    compiler: str | None = None,
) -> None:
    """Runs plans of one world size in one torchrun (of `worker`), one after the other. Raises with the output
    if one fails, unless it `may_fail`. With `resave` what was loaded is saved again before the first step.
    Under the `compiler` "aot_eager" graphs are cut and differentiated as ever, and run as they are: no kernel
    is made of them, by C++, which takes 10 CPU seconds a model."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, plan in enumerate(plans):
        path = folder / f"plan-{number}.json"
        path.write_text(plan.to_json())
        entries.append([str(path), str(folder / f"scratch-{number}")])
    (folder / "list.json").write_text(json.dumps({"plans": entries, "resave": resave, "compiler": compiler}))
    output = folder / "output.log"
    world_size = plans[0].launch.nproc_per_node
    code = run_ranks(world_size, worker, str(folder / "list.json"), output=output, timeout=timeout)
    if code and not (may_fail and code == 1):
        raise AssertionError(f"{code}: {output.read_text(errors='replace')[-9000:]}")


def run_ranks(
    world_size: int, module: str, *arguments: str, output: Path, timeout: float = 600.0, **env: str
) -> int | str:
    """Runs `python -m MODULE` in so many ranks, as torchrun would, to their end: the exit code of the first
    that fails, whereupon the others are killed, or words on the time that is up."""
    given = environment() | {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RESTART_COUNT": "0",
        **env,
    }
    argv = [sys.executable, "-u", "-m", module, *arguments]
    processes: list[subprocess.Popen[bytes]] = []
    with output.open("wb") as log:
        try:
            for rank in range(world_size):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(Popen("ranks", argv, env=given | own, stdout=log, stderr=log))
            deadline = time.monotonic() + timeout
            while True:
                codes = [process.poll() for process in processes]
                if any(codes) or None not in codes:
                    return next((code for code in codes if code), 0)
                if time.monotonic() > deadline:
                    return f"killed: not done within {timeout:.0f} s"
                time.sleep(0.02)
        finally:
            for process in processes:
                process.kill()
                process.wait(300)
