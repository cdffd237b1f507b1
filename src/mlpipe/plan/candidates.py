"""The candidates of one training stage: what the pipeline file leaves open, on given hardware."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, cast

from mlpipe._core.errors import PlanError
from mlpipe._core.presets import LlamaConfig
from mlpipe._core.units import parse_cadence
from mlpipe.kinds.train.spec import OwnData, Train
from mlpipe.plan.choose import Candidate, Pricer, Run, choose, meshes, micro_batches, smallest
from mlpipe.plan.flops import num_flops_per_token
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import (
    HEAP_BYTES,
    ROOMY_BYTES,
    Work,
    activations_bytes,
    counts,
    logits_bytes,
    rebuilt_bytes,
    small_bytes,
)
from mlpipe.plan.plan import CHECKPOINTING, Mesh, Precision, TrainPlan
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.time import Job, Passes, passes, traced_passes
from mlpipe.plan.traced import Traced

# What a model's size is read off; None: nobody knows it.
Shape = LlamaConfig | Traced | None


def global_batch(spec: Train) -> int:
    """In sequences."""
    if isinstance(spec.data, OwnData) or spec.data.batch_size is not None:
        return cast(int, spec.data.batch_size)
    return cast(int, spec.data.batch_tokens) // spec.model.seq_len


def enumerate_candidates(
    spec: Train, config: Shape, hardware: Hardware, *, every: bool = True
) -> list[Candidate]:
    """`config`: None for a user's own model that nobody traced. `every`: also what the file does not ask for.
    Raises PlanError where the file asks for what no hardware can do."""
    own = Mesh(dp_replicate=spec.mesh.dp_replicate, dp_shard=spec.mesh.dp_shard) if spec.mesh else None
    if own is not None and own.world_size != hardware.world_size:
        raise PlanError(
            f"mesh {own.dp_replicate} x {own.dp_shard} is for {own.world_size} workers, "
            f"but there are {hardware.world_size}",
            hint="make dp_replicate x dp_shard the number of workers",
        )
    peaks = hardware.speed.peak_flops
    precision, _ = precision_on(spec, hardware)
    if precision not in peaks:
        raise PlanError(f"{hardware.name} has no {precision}", hint="write precision: fp32")
    asked = None if spec.data.micro_batch == "auto" else spec.data.micro_batch
    sizes = micro_batches(global_batch(spec), hardware.world_size, asked)
    pricer = _pricer(spec, config, hardware) if config is not None else None
    modes = CHECKPOINTING if spec.activation_checkpointing == "auto" else (spec.activation_checkpointing,)
    found: list[Candidate] = []
    for strategy in ORDER:
        wanted = spec.strategy in ("auto", strategy)
        possible = [own] if own is not None and strategy == "hsdp" else meshes(strategy, hardware)
        if isinstance(possible, str):
            found.append(Candidate(strategy, None, None, modes[0], precision, wanted, None, False, possible))
            continue
        if pricer is None:
            reason = "the size of your own model is not known before it is built"
            found.append(
                Candidate(strategy, possible[0], sizes[0], modes[0], precision, wanted, None, True, reason)
            )
            continue
        for mesh in possible:
            for each in peaks if every else (precision,):
                for mode in CHECKPOINTING if every else modes:
                    open_ = wanted and each == precision and mode in modes
                    found += [
                        pricer.candidate(strategy, mesh, size, mode, each, asked=open_) for size in sizes
                    ]
    return found


def precision_on(spec: Train, hardware: Hardware) -> tuple[Precision, str]:
    """What `precision: auto` means there, or what the file says, and why: bf16 where the hardware computes it
    natively. What must repeat to the bit follows from the file alone, not from the machine at hand."""
    if spec.precision != "auto":
        return spec.precision, "as asked"
    peaks = hardware.speed.peak_flops
    if "bf16" not in peaks:
        return "fp32", f"{hardware.name} has no bf16"
    if hardware.speed.kernels and "fp32" in peaks:
        ratio = peaks["bf16"] / peaks["fp32"]
        return "bf16" if ratio > 1 else "fp32", f"bf16 was measured at {ratio:.2g} times the speed of fp32"
    if hardware.device == "cuda":
        return "bf16", f"{hardware.name} computes it natively"
    if hardware.native_bf16 is None:
        return "fp32", "no bf16 instructions are known of this CPU"
    if spec.deterministic:
        return "fp32", "a deterministic run must not depend on what this CPU can do"
    return "bf16", f"this CPU has {hardware.native_bf16}"


def pick(spec: Train, config: Shape, hardware: Hardware, *, simplest: bool = False) -> tuple[Candidate, str]:
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
    least = smallest(mine)
    return least, f"{spec.strategy}: as asked; {least.reason} per worker, too much"


def _pricer(spec: Train, config: LlamaConfig | Traced, hardware: Hardware) -> Pricer:
    every = parse_cadence(spec.checkpoint.every)
    run = Run(
        global_batch=global_batch(spec),
        seq_len=spec.model.seq_len,
        steps=spec.steps,
        num_flops_per_token=flops_per_token(spec, config),
        save_steps=every.steps,
        save_seconds=every.seconds,
        asynchronous=spec.checkpoint.asynchronous,
    )
    if isinstance(config, Traced):
        share = run.global_batch // hardware.world_size
        return Pricer(
            hardware,
            run,
            config.counts,
            partial(_traced_work, config, share, hardware.device),
            partial(_traced_passes, spec, config, share, hardware),
        )
    return _preset_pricer(run, config, spec.compile != "off", hardware)


def _preset_pricer(run: Run, config: LlamaConfig, compiled: bool, hardware: Hardware) -> Pricer:
    share = run.global_batch // hardware.world_size
    work = partial(_work, run.seq_len, config, hardware.device, share)
    done = partial(_passes, run.seq_len, compiled, config, share, hardware)
    return Pricer(hardware, run, counts(config), work, done)


def priced(plan: TrainPlan, hardware: Hardware) -> Candidate:
    """What was planned for a preset, perhaps by other figures, on `hardware`, which has as many workers."""
    config, seq_len = LlamaConfig(**plan.model.build.args), plan.model.seq_len
    run = Run(
        global_batch=plan.global_batch,
        seq_len=seq_len,
        steps=plan.steps,
        num_flops_per_token=num_flops_per_token(config, seq_len),
        save_steps=plan.checkpoint.every_steps,
        save_seconds=plan.checkpoint.every_seconds,
        asynchronous=plan.checkpoint.asynchronous,
    )
    return _preset_pricer(run, config, plan.compile != "off", hardware).candidate(
        plan.strategy, plan.mesh, plan.micro_batch, plan.activation_checkpointing, plan.precision, asked=True
    )


def flops_per_token(spec: Train, config: LlamaConfig | Traced) -> float:
    if isinstance(config, Traced):
        return config.num_flops_per_token
    return num_flops_per_token(config, spec.model.seq_len)


def _traced_work(
    traced: Traced, share: int, device: str, micro_batch: int, checkpointing: str, precision: str
) -> Work:
    found = traced.one(precision, checkpointing)
    held = micro_batch * found.sample_bytes
    small, roomy = (  # by the average
        held if held < limit * found.forward.num_kernels else 0 for limit in (HEAP_BYTES, ROOMY_BYTES)
    )
    return Work(
        precision,
        held,
        0,
        share // micro_batch,
        gloo=device == "cpu",
        small=small,
        roomy=roomy if checkpointing == "none" else None,
    )


def _traced_passes(
    spec: Train,
    traced: Traced,
    share: int,
    hardware: Hardware,
    micro_batch: int,
    checkpointing: str,
    precision: str,
) -> Passes:
    return traced_passes(
        traced,
        micro_batch=micro_batch,
        accumulation=share // micro_batch,
        precision=precision,
        checkpointing=checkpointing,
        compiled=spec.compile != "off",
        hardware=hardware,
    )


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
    same: Any = {"num_tokens": tokens, "precision": precision, "device": device}
    return Work(
        precision,
        activations_bytes(config, **same, checkpointing=checkpointing),
        logits_bytes(config, **same),
        share // micro_batch,
        rebuilt=rebuilt_bytes(config, **same, checkpointing=checkpointing),
        gloo=device == "cpu",
        small=small_bytes(config, **same, checkpointing=checkpointing),
        roomy=small_bytes(config, **same, checkpointing="none", below=ROOMY_BYTES)
        if checkpointing == "none"
        else None,
    )


def _passes(
    seq_len: int,
    compiled: bool,
    config: LlamaConfig,
    share: int,
    hardware: Hardware,
    micro_batch: int,
    checkpointing: str,
    precision: str,
) -> Passes:
    job = Job(
        config,
        seq_len,
        micro_batch,
        share // micro_batch,
        precision,
        checkpointing,
        compiled,
    )
    return passes(job, hardware)
