"""Which way to train, and why: every strategy x mesh x microbatch x checkpointing x precision, with its
bytes, seconds and dollars. Standard library only. Offloading to the host is no candidate: the trainer cannot
do it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mlpipe._core.errors import PlanError
from mlpipe._core.mfu import mfu_ratio
from mlpipe._core.units import format_bytes
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import Counts, MemoryEstimate, Work, is_sparing
from mlpipe.plan.plan import CHECKPOINTING, Mesh, Strategy
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.time import Passes, StepSeconds, Wire, save_seconds, update_seconds, whole_steps

# Two candidates whose step times differ by less are equally fast: the model does not know better.
_EQUAL = 0.02
_TIGHT = 0.95  # of the memory: what uses more fits if the estimate is right


@dataclass(frozen=True)
class Candidate:
    """One way. `mesh`, `micro_batch` and the figures are None where it cannot run (see `reason`); `memory`
    and what follows also for a user's own model, whose size is not known before it is built. `asked`: the
    file leaves it open or names it. `hours` and `usd`: of the whole run, without restarts and queues."""

    strategy: Strategy
    mesh: Mesh | None
    micro_batch: int | None
    activation_checkpointing: str
    precision: str
    asked: bool
    memory: MemoryEstimate | None
    fits: bool
    reason: str
    seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    mfu_ratio: float | None = None
    hours: float | None = None
    usd: float | None = None
    usd_per_million_tokens: float | None = None
    reduce_gradients: Literal["last", "every"] = "last"
    used_ratio: float = 0.0  # of the device's memory

    @property
    def step_seconds(self) -> float:
        return self.seconds.total if self.seconds is not None else math.inf


@dataclass(frozen=True)
class Run:
    """What all candidates of a stage have in common. `save_steps`, `save_seconds`: between checkpoints, which
    are written beside the training if `asynchronous`."""

    global_batch: int
    seq_len: int
    steps: int
    num_flops_per_token: float
    save_steps: int | None
    save_seconds: float | None
    asynchronous: bool = True


def micro_batches(global_batch: int, num_ranks: int, micro_batch: int | None) -> list[int]:
    """Sequences in one forward pass to choose from, largest first; `micro_batch` None: all that divide.
    Raises PlanError where `global_batch = micro_batch x num_ranks x accumulation` has no solution."""
    if global_batch % num_ranks:
        raise PlanError(
            f"a batch of {global_batch} cannot be split evenly over {num_ranks} workers",
            hint=f"make the batch size {max(1, round(global_batch / num_ranks)) * num_ranks}",
        )
    share = global_batch // num_ranks
    # divisors come in pairs, and only one of a pair is above the root
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    sizes = sorted({*small, *(share // size for size in small)}, reverse=True)
    if micro_batch is None:
        return sizes
    if micro_batch not in sizes:
        raise PlanError(
            f"micro_batch {micro_batch} does not divide the {share} sequences of each of {num_ranks} workers",
            hint=f"write micro_batch: auto, or one of {', '.join(map(str, sizes[:8]))}",
        )
    return [micro_batch]


def meshes(strategy: Strategy, hardware: Hardware) -> list[Mesh] | str:
    """The strategy's own first; of hsdp also copies within a node and over several. Or why there is none."""
    own = ORDER[strategy].mesh(hardware.num_nodes, hardware.devices_per_node)
    if isinstance(own, str) or strategy != "hsdp":
        return own if isinstance(own, str) else [own]
    world, per_node = hardware.world_size, hardware.devices_per_node
    shards = [
        n for n in range(2, world // 2 + 1) if world % n == 0 and (n % per_node == 0 or per_node % n == 0)
    ]
    return [own, *(Mesh(dp_replicate=world // n, dp_shard=n) for n in shards if n != own.dp_shard)]


class Pricer:
    """Bytes, seconds and dollars of candidates on one hardware; passes are computed once for all meshes."""

    def __init__(
        self,
        hardware: Hardware,
        run: Run,
        counts: Counts,
        work: Callable[[int, str, str], Work],
        passes: Callable[[int, str, str], Passes],
    ) -> None:
        self.hardware, self.run, self.counts, self.work, self.passes = hardware, run, counts, work, passes
        self.known: dict[tuple[int, str, str], tuple[Work, Passes]] = {}

    def candidate(
        self, strategy: Strategy, mesh: Mesh, size: int, checkpointing: str, precision: str, *, asked: bool
    ) -> Candidate:
        key = (size, checkpointing, precision)
        if key not in self.known:
            self.known[key] = (self.work(*key), self.passes(*key))
        work, found = self.known[key]
        hardware, run = self.hardware, self.run
        memory = self._memory(strategy, mesh, work)
        every = memory.total > hardware.memory_bytes and work.accumulation > 1 and mesh.dp_shard > 1
        if every:  # more to send, less to keep
            memory = self._memory(strategy, mesh, replace(work, reduce_every=True))
            found = replace(found, reduce_every=True)
        if not is_sparing(mesh, checkpointing):
            found = replace(found, new_memory=0.0)
        fits = memory.total <= hardware.memory_bytes
        seconds = self._seconds(strategy, mesh, found)
        rate = run.global_batch * run.seq_len / seconds.total
        peak = hardware.speed.peak_flops[precision] * mesh.world_size
        hours = run.steps * seconds.total / 3600
        price = hardware.price_usd_per_device_hour
        usd = None if price is None else price * mesh.world_size * hours
        return Candidate(
            strategy,
            mesh,
            size,
            checkpointing,
            precision,
            asked,
            memory,
            fits,
            f"needs {format_bytes(memory.total)} of {format_bytes(hardware.memory_bytes)}",
            seconds,
            rate,
            mfu_ratio(run.num_flops_per_token, rate, peak),
            hours,
            usd,
            None if usd is None else usd / (run.steps * run.global_batch * run.seq_len / 1e6),
            "every" if every else "last",
            memory.total / hardware.memory_bytes,
        )

    def _memory(self, strategy: Strategy, mesh: Mesh, work: Work) -> MemoryEstimate:
        memory = ORDER[strategy].memory(self.counts, work, mesh)
        return memory.on(self.hardware.device, mesh.world_size).scaled(self.hardware.speed.memory_ratio)

    def _seconds(self, strategy: Strategy, mesh: Mesh, found: Passes) -> StepSeconds:
        rules, hardware, run = ORDER[strategy], self.hardware, self.run
        update = update_seconds(rules.updated(self.counts, mesh), hardware)
        exposed = rules.exposed(found, Wire(hardware), mesh)
        compute = found.compute + found.new_memory + update
        interval = run.save_steps
        if interval is None:
            interval = whole_steps(run.save_seconds or 900.0, compute + exposed)
        between = interval * (compute + exposed) if run.asynchronous else None
        stall = save_seconds(self.counts.saved_bytes(mesh.world_size), hardware, between)
        # reading tokens is a copy out of a mapped file; the rest of a step's bookkeeping is a few kernels
        num_tokens = run.global_batch / mesh.num_data_ranks * run.seq_len
        data = num_tokens * 16 / hardware.speed.memory_bytes_per_second
        ratio = hardware.speed.time_ratio
        return StepSeconds(ratio * compute, ratio * exposed, data, stall / interval)


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first: what was asked for and fits, then what only fits, then what does not; each by time."""
    return sorted(candidates, key=lambda c: (not (c.asked and c.fits), not c.fits, c.step_seconds))


def choose(candidates: Sequence[Candidate], equal: float = _EQUAL) -> tuple[Candidate, str]:
    """Of what was asked for and fits the fastest; of several whose times differ by `equal` or less one that
    leaves memory free, the least sharded with the fewest recomputations and the largest microbatch. With the
    reason in words. Raises PlanError when nothing fits."""
    fitting = [c for c in candidates if c.asked and c.fits]
    if not fitting:
        raise PlanError(
            f"no strategy fits: {'; '.join(_closest(candidates))}",
            hint="more devices, a smaller micro_batch or seq_len, or activation_checkpointing: full",
        )
    fastest = min(c.step_seconds for c in fitting)
    if math.isinf(fastest):
        best = fitting[0]
        return best, (
            f"{best.strategy}: {best.reason}, so nothing is sharded; if it does not fit, write strategy: fsdp"
        )
    best = min((c for c in fitting if c.step_seconds <= fastest * (1 + equal)), key=simplicity)
    others = {(c.strategy, c.mesh) for c in fitting} - {(best.strategy, best.mesh)}
    shards = ORDER[best.strategy].SHARDS
    if math.isinf(equal) and shards != "nothing":
        why = f"the least sharded that fits (shards {shards})"
    elif not others:
        why = f"the only one that fits (shards {shards})" if shards != "nothing" else "nothing is sharded"
    elif shards == "nothing":
        why = "none is faster, and nothing needs to be sharded"
    else:
        why = f"the fastest of {len(others) + 1} that fit (shards {shards})"
    return best, f"{best.strategy}: {best.reason} per worker; {why}"


def simplicity(found: Candidate) -> tuple[bool, int, int, int, float]:
    order = list(ORDER).index(found.strategy)
    recompute = list[str](CHECKPOINTING).index(found.activation_checkpointing)
    return found.used_ratio > _TIGHT, order, recompute, -(found.micro_batch or 0), found.step_seconds


def smallest(candidates: Sequence[Candidate]) -> Candidate:
    """What needs least memory."""
    return min(candidates, key=lambda c: c.memory.total if c.memory else 0)


def _closest(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Of each strategy what needs least."""
    for strategy in ORDER:
        sizes = [c for c in candidates if c.strategy == strategy and c.asked and c.memory is not None]
        if sizes:
            yield f"{strategy}: {smallest(sizes).reason}"


def verdict(found: Candidate, chosen: Candidate) -> str:
    """Why this one was not chosen, in a few words."""
    if found == chosen:
        return "chosen"
    if not found.fits or found.seconds is None:
        return found.reason
    if not found.asked:
        parts = []
        if found.precision != chosen.precision:
            parts.append(f"precision: {found.precision}")
        if found.activation_checkpointing != chosen.activation_checkpointing:
            parts.append(f"activation_checkpointing: {found.activation_checkpointing}")
        if found.strategy != chosen.strategy:
            parts.append(f"strategy: {found.strategy}")
        if found.micro_batch != chosen.micro_batch:
            parts.append(f"micro_batch: {found.micro_batch}")
        return f"not asked for: {', '.join(parts) or 'mesh'}"
    ratio = found.step_seconds / chosen.step_seconds
    if ratio > 1 + _EQUAL:
        return f"{ratio:.2f} times the time"
    return "as fast, and shards more" if found.strategy != chosen.strategy else "as fast"
