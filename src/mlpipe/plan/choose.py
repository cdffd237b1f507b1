"""Which strategy, and why. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mlpipe._core.errors import PlanError
from mlpipe._core.units import format_bytes
from mlpipe.plan.hardware import Hardware
from mlpipe.plan.memory import Counts, MemoryEstimate, Work
from mlpipe.plan.plan import Mesh, Strategy
from mlpipe.plan.strategies import ORDER


@dataclass(frozen=True)
class Candidate:
    """One strategy on this hardware. `mesh`, `micro_batch` and `memory` are None where it cannot run (see
    `reason`); `memory` also for a user's own model, whose size is not known before it is built."""

    strategy: Strategy
    mesh: Mesh | None
    micro_batch: int | None
    memory: MemoryEstimate | None
    fits: bool
    reason: str


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


def candidate(
    strategy: Strategy,
    hardware: Hardware,
    *,
    micro_batches: list[int],
    counts: Counts | None,
    work: Callable[[int], Work],
    mesh: Mesh | None = None,
) -> Candidate:
    """`counts`: None for a model of unknown size. `work`: by micro-batch; the first of `micro_batches` that
    fits is taken, or the last. `mesh`: instead of the strategy's own."""
    rules = ORDER[strategy]
    chosen = mesh or rules.mesh(hardware.num_nodes, hardware.devices_per_node)
    if isinstance(chosen, str):
        return Candidate(strategy, None, None, None, False, chosen)
    if counts is None:
        reason = "the size of your own model is not known before it is built"
        return Candidate(strategy, chosen, micro_batches[0], None, True, reason)
    usable = hardware.usable_bytes
    for size in micro_batches:
        estimate = rules.memory(counts, work(size), chosen)
        if estimate.total <= usable:
            break
    fits = estimate.total <= usable
    needs = f"needs {format_bytes(estimate.total)} of {format_bytes(usable)} per worker"
    return Candidate(strategy, chosen, size, estimate, fits, needs if fits else f"{needs}, too much")


def choose(candidates: list[Candidate]) -> tuple[Candidate, str]:
    """The least sharded that fits, with the reason in words. Raises PlanError when none does."""
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        reasons = "; ".join(f"{c.strategy}: {c.reason}" for c in candidates if c.mesh is not None)
        raise PlanError(
            f"no strategy fits: {reasons}",
            hint="more devices, a smaller micro_batch or seq_len, or activation_checkpointing: full",
        )
    best = fitting[0]
    if best.memory is None:
        return best, (
            f"{best.strategy}: {best.reason}, so nothing is sharded; if it does not fit, write strategy: fsdp"
        )
    shards = ORDER[best.strategy].SHARDS
    why = "nothing needs to be sharded" if shards == "nothing" else f"the least sharded that fits ({shards})"
    return best, f"{best.strategy}: {best.reason}; {why}"
