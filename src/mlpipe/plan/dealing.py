"""Samples of different lengths to rows of microbatches, and these to ranks: pure functions of the lengths,
the same on every rank.

Rows hold several samples behind each other (packing). `best_fit`: best-fit decreasing (Johnson, 1974), dealt
as they come. `balanced`: samples go to the row with the least work so far, the longest first (LPT; Graham,
1969), and of equally many rows a rank all ranks compute at the same time those of like work. Every rank gets
equally many, as collectives need it. Which samples make a step is not touched: only who computes which.

Ranks that need not meet at each microbatch (`deal_freely`) have as many rows as it takes: balanced is then
what each of them computes in all, and rows are as full as they can be.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import Literal

from mlpipe.plan.mesh import Mesh
from mlpipe.plan.settings import Communication
from mlpipe.plan.shapes.shape import ModelShape
from mlpipe.plan.shares import bounds

Row = list[int]  # numbers of samples of the step
Work = list[list[float]]  # of a step: of each rank each microbatch's, in any unit
Mode = Literal["best_fit", "balanced"]
Device = Literal["cpu", "cuda"]


def deal(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, capacity: int, mode: Mode
) -> list[list[Row]]:
    """The rows of each rank, in the order of its microbatches. An empty row: nothing is left for that rank.
    `costs`: work of each sample, in any unit. `capacity`: tokens that a row may have; no sample is longer."""
    if mode == "best_fit":
        rows = best_fit_decreasing(lengths, capacity)
        each = math.ceil(len(rows) / num_ranks)
        rows += [[] for _ in range(each * num_ranks - len(rows))]
        return [rows[rank * each : (rank + 1) * each] for rank in range(num_ranks)]
    each = math.ceil(sum(lengths) / (capacity * num_ranks))
    while (balanced := _least_loaded(lengths, costs, each * num_ranks, capacity)) is None:
        each += 1
    return _like_meets_like(balanced, costs, num_ranks)


def cost_of_samples(shape: ModelShape | None) -> Callable[[int], float]:
    """FLOPs of a sample of so many tokens: of attention they grow with the square, and a token looks at half
    of the sample on the mean. None of a shape: of a user's own model, whose work is its tokens."""
    if shape is None:
        return float
    return lambda length: length * shape.flops_per_token((length + 1) // 2)


def work_of(dealt: list[list[Row]], costs: Sequence[float]) -> Work:
    """What each rank computes."""
    return [[math.fsum(costs[sample] for sample in row) for row in rows] for rows in dealt]


def waits_of(communication: Communication, mesh: Mesh) -> Communication:
    """How its ranks wait, as of `cost_of_step`: whole weights need no gathering, and who has them meets the
    others behind the last pass alone."""
    return "on_demand" if communication == "resident" and mesh.dp_shard == 1 else communication


def cost_of_step(
    work: Work, communication: Communication, device: Device = "cuda", num_blocks: int = 16
) -> float:
    """Until all ranks are done. Where they meet in each microbatch it takes as long as the longest beside it;
    on demand nobody waits before the end. Where weights are gathered once, ranks go through the first forward
    pass together, and through the last backward pass, two thirds of a microbatch's work. On GPUs collectives
    wait in a stream of their own: nobody begins a block whose weights are gathered as all begin the one
    before, nor ends one before all have ended the one before. With gloo ranks themselves wait in them: they
    begin each block of the first together, and end each of the last together. `num_blocks`: of the model;
    more than a few make little difference."""
    if communication == "collective":
        return math.fsum(map(max, zip_longest(*work, fillvalue=0.0)))
    if communication == "on_demand":
        return max(map(math.fsum, work))
    first = [rows[0] / 3 if rows else 0.0 for rows in work]
    last = [2 * rows[-1] / 3 if rows else 0.0 for rows in work]
    begins, ends = [0.0] * len(work), [0.0] * len(work)
    for _ in range(num_blocks):
        begun = max(begins if device == "cuda" else ends)
        begins = [max(end, begun) for end in ends]
        ends = [begin + pass_ / num_blocks for begin, pass_ in zip(begins, first, strict=True)]
    ends = [end + sum(rows) - a - b for end, rows, a, b in zip(ends, work, first, last, strict=True)]
    all_ended = 0.0
    for _ in range(num_blocks):
        ends = [max(end + pass_ / num_blocks, all_ended) for end, pass_ in zip(ends, last, strict=True)]
        all_ended = max(ends)
        if device == "cpu":
            ends = [all_ended] * len(ends)
    return all_ended


def idle_ratio(steps: Iterable[Work], communication: Communication, device: Device = "cuda") -> float:
    """Share of the ranks' time for which they wait for each other, over all `steps`."""
    busy, taken = 0.0, 0.0
    for work in steps:
        busy += sum(map(sum, work))
        taken += len(work) * cost_of_step(work, communication, device)
    return 1 - busy / taken if taken else 0.0


def deal_freely(
    lengths: Sequence[int],
    costs: Sequence[float],
    num_ranks: int,
    capacity: int,
    mode: Mode,
    speeds: Sequence[float] | None = None,
) -> list[list[Row]]:
    """As `deal`, but a rank may have any number of rows, also none, and none of them is empty. `balanced`:
    LPT over the ranks, which pack what they got; a rank's lightest row is its last, behind which the
    gradients travel. `speeds`: of the ranks, where they differ (see `plan/shares.py`)."""
    if mode == "best_fit":
        rows = best_fit_decreasing(lengths, capacity)
        return [rows[begin:end] for begin, end in pairwise(bounds(len(rows), num_ranks, speeds))]
    mine = _by_load(costs, num_ranks) if speeds is None else _by_end(costs, speeds)
    dealt = []
    for samples in mine:
        rows = best_fit_decreasing([lengths[sample] for sample in samples], capacity)
        named = [sorted(samples[i] for i in row) for row in rows]
        dealt.append(sorted(named, key=lambda row: -sum(costs[sample] for sample in row)))
    return dealt


def _by_load(costs: Sequence[float], num_ranks: int) -> list[Row]:
    """Each sample to the rank with the least work so far."""
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    mine: list[Row] = [[] for _ in range(num_ranks)]
    for sample in _decreasing(costs):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[sample], rank))
        mine[rank].append(sample)
    return mine


def _by_end(costs: Sequence[float], speeds: Sequence[float]) -> list[Row]:
    """Each sample to the rank that would be done with it first."""
    loads = [0.0] * len(speeds)
    mine: list[Row] = [[] for _ in speeds]
    for sample in _decreasing(costs):
        ends = [(load + costs[sample]) / speed for load, speed in zip(loads, speeds, strict=True)]
        rank = ends.index(min(ends))
        loads[rank] += costs[sample]
        mine[rank].append(sample)
    return mine


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[Row]:
    """Each sample, the longest first, into the fullest row that has room for it."""
    rows: list[Row] = []
    room: list[tuple[int, int]] = []  # of each row, and its number; sorted
    for sample in _decreasing(lengths):
        at = bisect_left(room, (lengths[sample], -1))
        if at == len(room):
            rows.append([sample])
            insort(room, (capacity - lengths[sample], len(rows) - 1))
        else:
            left, number = room.pop(at)
            rows[number].append(sample)
            insort(room, (left - lengths[sample], number))
    return [sorted(row) for row in rows]


def _least_loaded(
    lengths: Sequence[int], costs: Sequence[float], num_rows: int, capacity: int
) -> list[Row] | None:
    """None: a sample found no row with room."""
    rows: list[Row] = [[] for _ in range(num_rows)]
    room = [capacity] * num_rows
    loads = [(0.0, number) for number in range(num_rows)]  # a heap
    for sample in _decreasing(costs):
        full = []
        while loads and room[loads[0][1]] < lengths[sample]:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, number = loads[0]
        heapq.heapreplace(loads, (load + costs[sample], number))
        rows[number].append(sample)
        room[number] -= lengths[sample]
        for one in full:
            heapq.heappush(loads, one)
    return [sorted(row) for row in rows]


def _like_meets_like(rows: list[Row], costs: Sequence[float], num_ranks: int) -> list[list[Row]]:
    """Rows of neighbouring work are computed at the same time; of these the heaviest goes to the rank that
    has had the least."""
    work = [sum(costs[sample] for sample in row) for row in rows]
    order = _decreasing(work)
    dealt: list[list[Row]] = [[] for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (totals[rank], rank))
        for rank, number in zip(ranks, order[start : start + num_ranks], strict=True):
            dealt[rank].append(rows[number])
            totals[rank] += work[number]
    return dealt


def _decreasing(values: Sequence[float]) -> list[int]:
    """Numbers of the values, the largest first; of equal ones in their order."""
    return sorted(range(len(values)), key=lambda number: (-values[number], number))
