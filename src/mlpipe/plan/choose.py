"""Which of the candidates to train by, and why. Standard library only. Offloading to the host is no
candidate of `auto`: what a host has left nobody knows."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from mlpipe._core.errors import PlanError
from mlpipe._core.meshes import Strategy
from mlpipe.plan.memory import MemoryEstimate
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.settings import CHECKPOINTING, Communication, ContextExchange
from mlpipe.plan.strategies import ORDER
from mlpipe.plan.time import StepSeconds

# Two candidates whose step times differ by less are equally fast: the model does not know better.
_EQUAL = 0.02
_TIGHT = 0.92  # of the memory: what uses more fits if the estimate is right
ROOM_WINDOW = 1.05  # times the least seconds: for what leaves memory free


class Candidate(NamedTuple):
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
    communication: Communication = "collective"
    context_exchange: ContextExchange = "all_gather"
    used_ratio: float = 0.0  # of the device's memory
    host_bytes: int = 0  # of a worker, that wait on the host

    @property
    def step_seconds(self) -> float:
        return self.seconds.total if self.seconds is not None else math.inf

    @property
    def num_tokens(self) -> float:
        """Of a step."""
        return (self.tokens_per_second or 0.0) * self.step_seconds


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Best first: what was asked for and fits, then what only fits, then what does not; each by time."""
    return sorted(candidates, key=lambda c: (not (c.asked and c.fits), not c.fits, c.step_seconds))


def choose(candidates: Sequence[Candidate], equal: float = _EQUAL) -> tuple[Candidate, str]:
    """Of what was asked for and fits the fastest; of several whose times differ by `equal` or less one that
    leaves memory free, the least sharded with the fewest recomputations and the largest microbatch; one that
    leaves none only if none that does is within 5 %. With the reason in words. Raises PlanError when nothing
    fits."""
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
    best = _fast_with_room(fitting, equal)
    others = {(c.strategy, c.mesh) for c in fitting} - {(best.strategy, best.mesh)}
    shards = ORDER[best.strategy].SHARDS
    if math.isinf(equal) and shards != "nothing":
        why = f"the least sharded that fits (shards {shards})"
    elif not others:
        why = f"the only one that fits (shards {shards})" if shards != "nothing" else "nothing is sharded"
    elif shards == "nothing":
        why = "none is faster, and nothing needs to be sharded"
    else:
        why = f"{_rank_of(best, fastest)} of {len(others) + 1} that fit (shards {shards})"
    return best, f"{best.strategy}: {best.reason} per worker; {why}"


def _fast_with_room(fitting: Sequence[Candidate], equal: float = _EQUAL) -> Candidate:
    fastest = min(c.step_seconds for c in fitting)
    best = min((c for c in fitting if c.step_seconds <= fastest * (1 + equal)), key=simplicity)
    if is_tight(best):
        roomy = (c for c in fitting if c.step_seconds <= fastest * ROOM_WINDOW and not is_tight(c))
        best = min(roomy, key=simplicity, default=best)
    return best


def cheaper(ways: Sequence[Candidate]) -> Candidate:
    """Of ways to do the same: by time and room as `choose`; where none leaves memory free, of those within
    5 % of the fastest the one that needs least, and where none fits, of all."""
    if len(ways) == 1:
        return ways[0]
    fitting = [way for way in ways if way.fits]
    if not fitting:
        return smallest(ways)
    best = _fast_with_room(fitting)
    if is_tight(best):  # so are all that are as fast
        fastest = min(way.step_seconds for way in fitting)
        near = (way for way in fitting if way.step_seconds <= fastest * ROOM_WINDOW)
        best = min(near, key=lambda way: way.used_ratio)
    return best


def _rank_of(best: Candidate, fastest: float) -> str:
    """In words, among all that fit. `fastest`: seconds of a step of theirs."""
    if best.step_seconds == fastest:
        return "the fastest"
    if best.step_seconds <= fastest * (1 + _EQUAL):
        return "as fast as any"
    return f"leaves memory free and is within {ROOM_WINDOW - 1:.0%} of the fastest"


def is_tight(candidate: Candidate) -> bool:
    """Whether it fits only if the estimate is right."""
    return candidate.used_ratio > _TIGHT


def simplicity(candidate: Candidate) -> tuple[bool, int, int, int, int, float]:
    """The smaller the better: room in memory, ranks that read different samples, little sharding, little
    recomputation, large micro-batches."""
    order = list(ORDER).index(candidate.strategy)
    recompute = list[str](CHECKPOINTING).index(candidate.activation_checkpointing)
    mesh = candidate.mesh or Mesh()
    shared = mesh.world_size // mesh.num_data_ranks
    micro = -(candidate.micro_batch or 0)
    return is_tight(candidate), shared, order, recompute, micro, candidate.step_seconds


_LESS_SIMPLE = (
    "leaves little memory free",
    "more workers share samples",
    "shards more",
    "recomputes more",
    "has smaller micro-batches",
)


def smallest(candidates: Sequence[Candidate]) -> Candidate:
    """What needs least memory."""
    return min(candidates, key=lambda c: c.memory.total if c.memory else 0)


def _closest(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Of each strategy what needs least."""
    for strategy in ORDER:
        sizes = [c for c in candidates if c.strategy == strategy and c.asked and c.memory is not None]
        if sizes:
            yield f"{strategy}: {smallest(sizes).reason}"


def verdict(other: Candidate, chosen: Candidate) -> str:
    """Why this one was not chosen, in a few words."""
    if other == chosen:
        return "chosen"
    if not other.fits or other.seconds is None:
        return other.reason
    if not other.asked:
        parts = []
        if other.precision != chosen.precision:
            parts.append(f"precision: {other.precision}")
        if other.activation_checkpointing != chosen.activation_checkpointing:
            parts.append(f"activation_checkpointing: {other.activation_checkpointing}")
        if other.strategy != chosen.strategy:
            parts.append(f"strategy: {other.strategy}")
        if other.micro_batch != chosen.micro_batch:
            parts.append(f"micro_batch: {other.micro_batch}")
        return f"not asked for: {', '.join(parts) or 'mesh'}"
    ratio = other.step_seconds / chosen.step_seconds
    if ratio > 1 + _EQUAL:
        return f"{ratio:.2f} times the time"
    speed = "as fast" if ratio >= 1 - _EQUAL else f"{ratio:.2f} times the time"
    pairs = zip(simplicity(other), simplicity(chosen), _LESS_SIMPLE, strict=False)
    first = next(((mine > theirs, word) for mine, theirs, word in pairs if mine != theirs), None)
    return f"{speed}, and {first[1]}" if first and first[0] else speed
