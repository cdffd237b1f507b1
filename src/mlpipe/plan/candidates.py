"""The candidates of one training stage: what the pipeline file leaves open, on given hardware."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import cast

from mlpipe._core.errors import PlanError
from mlpipe._core.units import parse_cadence
from mlpipe.plan.choose import Candidate, Pricer, Run, choose, meshes, micro_batches
from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import Work, activations_bytes, counts, logits_bytes
from mlpipe.plan.plan import Mesh
from mlpipe.plan.presets import LlamaConfig
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.time import Job
from mlpipe.spec.model import OwnData, Train

CHECKPOINTING = ("none", "selective", "full")


def global_batch(spec: Train) -> int:
    """In sequences."""
    if isinstance(spec.data, OwnData) or spec.data.batch_size is not None:
        return cast(int, spec.data.batch_size)
    return cast(int, spec.data.batch_tokens) // spec.model.seq_len


def enumerate_candidates(
    spec: Train, config: LlamaConfig | None, hardware: Hardware, *, every: bool = True
) -> list[Candidate]:
    """`config`: None for a user's own model. `every`: also what the file does not ask for. Raises PlanError
    where the file asks for what no hardware can do."""
    own = Mesh(dp_replicate=spec.mesh.dp_replicate, dp_shard=spec.mesh.dp_shard) if spec.mesh else None
    if own is not None and own.world_size != hardware.world_size:
        raise PlanError(
            f"mesh {own.dp_replicate} x {own.dp_shard} is for {own.world_size} workers, "
            f"but there are {hardware.world_size}",
            hint="make dp_replicate x dp_shard the number of workers",
        )
    peaks = hardware.speed.peak_flops
    if spec.precision not in peaks:
        raise PlanError(f"{hardware.name} has no {spec.precision}", hint="write precision: fp32")
    asked = None if spec.data.micro_batch == "auto" else spec.data.micro_batch
    sizes = micro_batches(global_batch(spec), hardware.world_size, asked)
    pricer = _pricer(spec, config, hardware) if config is not None else None
    modes = CHECKPOINTING if spec.activation_checkpointing == "auto" else (spec.activation_checkpointing,)
    found: list[Candidate] = []
    for strategy in ORDER:
        wanted = spec.strategy in ("auto", strategy)
        possible = [own] if own is not None and strategy == "hsdp" else meshes(strategy, hardware)
        if isinstance(possible, str):
            found.append(
                Candidate(strategy, None, None, modes[0], spec.precision, wanted, None, False, possible)
            )
            continue
        if pricer is None:
            reason = "the size of your own model is not known before it is built"
            found.append(
                Candidate(
                    strategy, possible[0], sizes[0], modes[0], spec.precision, wanted, None, True, reason
                )
            )
            continue
        for mesh in possible:
            for precision in peaks if every else (spec.precision,):
                for mode in CHECKPOINTING if every else modes:
                    open_ = wanted and precision == spec.precision and mode in modes
                    found += [
                        pricer.candidate(strategy, mesh, size, mode, precision, asked=open_) for size in sizes
                    ]
    return found


def pick(
    spec: Train, config: LlamaConfig | None, hardware: Hardware, *, simplest: bool = False
) -> tuple[Candidate, str]:
    """The best, or the best of the strategy asked for, which is not refused for memory alone: the estimate
    may err. With the reason. `simplest`: whatever fits and shards least, for work whose steps are not
    training's. Raises PlanError."""
    found = enumerate_candidates(spec, config, hardware, every=False)
    if spec.strategy == "auto":
        return choose(found, equal=math.inf) if simplest else choose(found)
    mine = [c for c in found if c.asked]
    if mine[0].mesh is None:
        raise PlanError(mine[0].reason, hint="choose another strategy, or auto")
    if any(c.fits for c in mine):
        best, _ = choose(mine)
        per_worker = " per worker" if best.memory else ""
        return best, f"{spec.strategy}: as asked; {best.reason}{per_worker}"
    least = min(mine, key=lambda c: c.memory.total if c.memory else 0)
    return least, f"{spec.strategy}: as asked; {least.reason} per worker, too much"


def _pricer(spec: Train, config: LlamaConfig, hardware: Hardware) -> Pricer:
    every = parse_cadence(spec.checkpoint.every)
    run = Run(
        global_batch=global_batch(spec),
        seq_len=spec.model.seq_len,
        steps=spec.steps,
        num_flops_per_token=num_flops_per_token(config, spec.model.seq_len),
        save_steps=every.steps,
        save_seconds=every.seconds,
    )
    share = run.global_batch // hardware.world_size
    work = partial(_work, spec.model.seq_len, config, hardware.device, share)
    job = partial(_job, spec, config, share)
    return Pricer(hardware, run, counts(config), work, job)


def _work(
    seq_len: int,
    config: LlamaConfig,
    device: str,
    share: int,
    micro_batch: int,
    checkpointing: str,
    precision: str,
) -> Work:
    tokens = micro_batch * seq_len
    activations = activations_bytes(
        config, num_tokens=tokens, precision=precision, device=device, checkpointing=checkpointing
    )
    logits = logits_bytes(config, num_tokens=tokens, precision=precision, device=device)
    return Work(precision, activations, logits, share // micro_batch)


def _job(
    spec: Train, config: LlamaConfig, share: int, micro_batch: int, checkpointing: str, precision: str
) -> Job:
    return Job(
        config,
        spec.model.seq_len,
        micro_batch,
        share // micro_batch,
        precision,
        checkpointing,
        spec.compile == "block",
    )


def on_nodes(hardware: Hardware, num_nodes: int) -> Hardware:
    return replace(hardware, num_nodes=num_nodes)
