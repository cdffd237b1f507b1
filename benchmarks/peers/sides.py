"""How each side is started: its environment, its command, its settings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import launch
from benchmarks.peers.work import Work
from mlpipe.plan.plan import Plan

ROOT = Path(__file__).parents[2]
# script -> the environment that it needs; the raw ones need torch and numpy only, which are in mlpipe's own
SCRIPTS = {
    "raw_ddp": None,
    "raw_fsdp": None,
    "accelerate_ddp": "training",
    "fabric_ddp": "training",
    "deepspeed_zero1": "deepspeed",
    "hf_trainer": "training",
}
ON_MESHES = {"titan_mesh": "titan"}  # of `meshes.py`
ON_REPLICAS = {"torchft_ddp": "torchft"}  # of `benchmarks.goodput`
ON_CHATS = {"trl_sft": "tuning", "torchtune_sft": "tuning"}  # of `chats.py`
NAMES = {
    "raw_ddp": "raw DDP",
    "raw_fsdp": "raw FSDP2",
    "accelerate_ddp": "Accelerate",
    "fabric_ddp": "Fabric",
    "deepspeed_zero1": "DeepSpeed ZeRO-1",
    "hf_trainer": "HF Trainer",
}
GPT = {"vocab_size": 8192, "dim": 256, "num_layers": 4, "num_heads": 4, "seq_len": 256}  # 7.4M parameters
WIDE = GPT | {"dim": 512, "num_heads": 8}  # 21M


def python_of(script: str) -> str:
    """Raises FileNotFoundError that says how the environment is made."""
    environment = {**SCRIPTS, **ON_MESHES, **ON_REPLICAS, **ON_CHATS}[script]
    if environment is None:
        return sys.executable
    path = ROOT / f".venv-bench-{environment}" / "bin" / "python"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; `make .venv-bench-{environment}/.done` makes it")
    return str(path)


def environment(work: Work) -> dict[str, str]:
    """One thread a rank, as torchrun sets it and as mlpipe does on two cores. Byte code is kept, whatever the
    machine says: without, every process compiles all that it imports."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    if work.checkpoint:
        # As mlpipe's launcher does. Without it a restarted worker of torch 2.15 looks for the dead ones of
        # before: "Gloo connectFullMesh failed".
        kept["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(launch.ROOT), str(launch.ROOT / "src")]),
        "BENCHMARK": json.dumps(asdict(work)),
    }


def torchrun(script: str, *options: str, num_ranks: int = 2) -> list[str]:
    return [
        python_of(script), "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks),
        *(options or ("--standalone",)), "-m", f"benchmarks.peers.{script}",
    ]  # fmt: skip


def start(argv: list[str], work: Work, log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(
            argv, env=environment(work), cwd=launch.ROOT, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def mlpipe_plan(work: Work, folder: Path, **overrides: Any) -> Plan:
    """What a user with the same model, data and optimizer writes; no save by itself."""
    entry = {
        "entry": "benchmarks.peers.gpt:build_model",
        "seq_len": work.model["seq_len"],
        "args": work.model,
    }
    settings = {
        "model": json.dumps(entry),
        "data__batch_size": 2 * work.batch,
        "optimizer__lr": work.lr,
        "optimizer__warmup_steps": 0,
        "optimizer__weight_decay": 0,
        "optimizer__grad_clip": work.grad_clip,
        "hang_timeout": "2 h",
        "seed": work.seed,
        **overrides,
    }
    return launch.train_plan(folder, Path(work.tokens), work.side.replace(" ", "-"), **settings)


def launcher(plan: Plan, folder: Path, module: str | None = None) -> list[str]:
    """mlpipe's own launcher, with `module` as its worker."""
    folder.mkdir(parents=True, exist_ok=True)
    if module:
        plan = replace(plan, launch=plan.launch._replace(argv=("-m", module)))
    path = folder / "plan.json"
    path.write_text(plan.to_json())
    scratch = str(folder / "scratch")
    return [sys.executable, "-m", "mlpipe.train.launcher", "--plan", str(path), "--scratch", scratch]
