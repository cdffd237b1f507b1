"""Which passes a rank of a pipeline makes in which order: what the trainer runs and the planner counts.

A model is cut into stages, one after the other; stage `s` lies on rank `s % num_ranks`. A microbatch goes
forward (F) through all stages and backward through all of them in reverse, whole (B), or first the part that
the stage before waits for (I, the gradient of the input), and later the rest (W, the weights' gradients).

gpipe         all forward passes, then all backward passes (Huang et al., 2019)
1f1b          a backward pass as soon as there is one, so that few microbatches are held (Narayanan et al.,
              PipeDream, 2019)
interleaved   1f1b with two stages a rank, half as idle for twice the transfers (Narayanan et al., 2021)
zero_bubble   1f1b with backward passes in two parts; W fills what would be idle (Qi et al., 2023, ZB-H1)

Standard library only. The orders are those of `torch.distributed.pipelining`, which a test compares.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from mlpipe._core.pipelines import Schedule, stages_per_rank, why_not

Pass = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """A pass of one microbatch through one stage."""

    kind: Pass
    stage: int
    microbatch: int


class Transfer(NamedTuple):
    """What a rank sends or receives: the output of stage `stage` in `kind` F, or else the gradient of its
    input."""

    sends: bool
    kind: Literal["F", "B"]
    stage: int
    microbatch: int


def order(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """The passes of one rank. Raises ValueError for numbers that the schedule cannot do."""
    if why := why_not(schedule, num_ranks, num_microbatches):
        raise ValueError(why)
    num_own = stages_per_rank(schedule)
    in_round = num_microbatches // max(1, num_microbatches // num_ranks)
    total = num_own * num_microbatches
    hops = num_ranks - 1 - rank
    ahead = {
        "gpipe": total,
        "1f1b": hops,
        "interleaved": (num_own - 1) * in_round + 2 * hops,
        "zero_bubble": hops,
    }[schedule]
    warm = min(ahead, total)

    def nth(kind: Pass, number: int) -> Action:
        """Of all passes of this kind; microbatches take turns by rounds through the rank's stages."""
        local = number // in_round % num_own if num_own > 1 else 0
        own = local if kind == "F" else num_own - 1 - local
        turn = number // (in_round * num_own) * in_round + number % in_round if num_own > 1 else number
        return Action(kind, own * num_ranks + rank, turn)

    actions = [nth("F", number) for number in range(warm)]
    num_weights = 0
    for number in range(total):
        if warm + number < total:
            actions.append(nth("F", warm + number))
        if schedule != "zero_bubble":
            actions.append(nth("B", number))
            continue
        actions.append(nth("I", number))
        if number >= rank:  # the later the rank, the more it keeps for when nothing comes any more
            actions.append(nth("W", num_weights))
            num_weights += 1
    actions += [nth("W", number) for number in range(num_weights, total if schedule == "zero_bubble" else 0)]
    return actions


def orders(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """By rank."""
    return [order(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]


@lru_cache(maxsize=8)
def with_transfers(
    schedule: Schedule, num_ranks: int, num_microbatches: int
) -> tuple[tuple[Action | Transfer, ...], ...]:
    """By rank, the passes with what is sent and received between them. Any two ranks have what they exchange
    in the same order, in which no rank waits for one that waits for it (NCCL has a queue for each pair)."""
    lists: list[list[Action | Transfer]] = [[] for _ in range(num_ranks)]
    last = stages_per_rank(schedule) * num_ranks - 1

    def done(rank: int, action: Action) -> None:
        lists[rank].append(action)
        sent = _sent(action, last)
        if sent is not None:
            kind, to = sent
            lists[rank].append(Transfer(True, kind, action.stage, action.microbatch))
            lists[to % num_ranks].append(Transfer(False, kind, action.stage, action.microbatch))

    _walk(orders(schedule, num_ranks, num_microbatches), last, done)
    return tuple(tuple(actions) for actions in lists)


def _sent(action: Action, last: int) -> tuple[Literal["F", "B"], int] | None:
    """What another rank waits for behind this pass, and the stage that does."""
    if action.kind == "F" and action.stage < last:
        return "F", action.stage + 1
    if action.kind in "BI" and action.stage > 0:
        return "B", action.stage - 1
    return None


def _needs(action: Action, last: int) -> Action | None:
    """The pass elsewhere that has to be done before this one; a backward pass of kind B stands for I, too."""
    if action.kind == "F" and action.stage > 0:
        return Action("F", action.stage - 1, action.microbatch)
    if action.kind in "BI" and action.stage < last:
        return Action("B", action.stage + 1, action.microbatch)
    return None


def _walk(by_rank: Sequence[Sequence[Action]], last: int, done: Callable[[int, Action], None]) -> None:
    """All passes, in rounds in which each rank makes one, if what it needs was done in an earlier round."""
    finished: set[Action] = set()
    position = [0] * len(by_rank)
    while any(position[rank] < len(actions) for rank, actions in enumerate(by_rank)):
        ready = []
        for rank, actions in enumerate(by_rank):
            if position[rank] < len(actions):
                action = actions[position[rank]]
                needed = _needs(action, last)
                if needed is None or needed in finished:
                    ready.append((rank, action))
        if not ready:
            raise ValueError("the passes wait for each other")
        for rank, action in ready:
            position[rank] += 1
            done(rank, action)
            finished.add(action._replace(kind="B") if action.kind == "I" else action)


def idle_ratio(
    by_rank: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0, weights: float = 1.0
) -> float:
    """Share of the ranks' time in which they have nothing to do, where a stage takes so long: `backward` in
    all, `weights` the part of it that is W."""
    seconds = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
    last = max(action.stage for actions in by_rank for action in actions)
    ends: dict[Action, float] = {}
    free: dict[int, float] = defaultdict(float)

    def done(rank: int, action: Action) -> None:
        needed = _needs(action, last)
        began = max(free[rank], ends[needed] if needed is not None else 0.0)
        free[rank] = began + seconds[action.kind]
        if action.kind != "W":
            ends[action._replace(kind="F" if action.kind == "F" else "B")] = free[rank]

    _walk(by_rank, last, done)
    busy = sum(seconds[action.kind] for actions in by_rank for action in actions)
    return 1.0 - busy / (len(by_rank) * max(free.values()))


def bubble_passes(schedule: Schedule, num_ranks: int) -> tuple[float, float]:
    """How long a rank is idle in a step, as in the papers: so many forward passes of all that it has, and so
    many backward passes. Of `zero_bubble` with W as long as I."""
    if schedule == "zero_bubble":  # (p - 1) (F + I - W)
        return float(num_ranks - 1), 0.0
    share = (num_ranks - 1) / stages_per_rank(schedule)
    return share, share


def num_transfers(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> int:
    """What a rank sends and receives in a step: at both ends of each of its stages, but for the model's own
    ends, the residual stream and its gradient."""
    ends = (rank == 0) + (rank == num_ranks - 1)
    return num_microbatches * (4 * stages_per_rank(schedule) - 2 * ends)


class Held(NamedTuple):
    """In a pass of a rank through the stage `own` of its stages, counted from 0, or of kind W before it: of
    how many microbatches, its own among them, all activations are kept, by stage, and of how many what is put
    off until W."""

    kind: Pass
    own: int
    kept: tuple[int, ...]
    put_off: int


@lru_cache(maxsize=64)
def held(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> tuple[Held, ...]:
    """All that there are in a step."""
    kept, put_off = [0] * stages_per_rank(schedule), 0
    found: dict[Held, None] = {}
    for kind, stage, _ in order(schedule, rank, num_ranks, num_microbatches):
        own = stage // num_ranks
        kept[own] += kind == "F"
        found[Held(kind, own, tuple(kept), put_off)] = None
        kept[own] -= kind in "BI"
        put_off += (kind == "I") - (kind == "W")
    return tuple(found)
