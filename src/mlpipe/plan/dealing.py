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
from collections.abc import Sequence
from typing import Literal

Row = list[int]  # numbers of samples of the step
Mode = Literal["best_fit", "balanced"]


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


def cost_together(dealt: list[list[Row]], costs: Sequence[float]) -> float:
    """Of ranks that meet at each row: each takes as long as the longest beside it."""
    beside = zip(*dealt, strict=True)
    each = [max(float(sum(costs[sample] for sample in row)) for row in rows) for rows in beside]
    return math.fsum(each)


def best_of_equal(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, capacity: int
) -> list[list[Row]]:
    """The way to deal equally many rows that takes least time."""
    modes: tuple[Mode, ...] = ("best_fit", "balanced")
    ways = [deal(lengths, costs, num_ranks, capacity, mode) for mode in modes]
    return min(ways, key=lambda dealt: cost_together(dealt, costs))


def deal_freely(
    lengths: Sequence[int], costs: Sequence[float], num_ranks: int, capacity: int, mode: Mode
) -> list[list[Row]]:
    """As `deal`, but a rank may have any number of rows, also none, and none of them is empty. `balanced`:
    LPT over the ranks, which pack what they got; a rank's lightest row is its last, behind which the
    gradients travel."""
    if mode == "best_fit":
        return [[row for row in rows if row] for rows in deal(lengths, costs, num_ranks, capacity, mode)]
    loads = [(0.0, rank) for rank in range(num_ranks)]  # a heap
    mine: list[Row] = [[] for _ in range(num_ranks)]
    for sample in _decreasing(costs):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + costs[sample], rank))
        mine[rank].append(sample)
    dealt = []
    for samples in mine:
        rows = best_fit_decreasing([lengths[sample] for sample in samples], capacity)
        named = [sorted(samples[i] for i in row) for row in rows]
        dealt.append(sorted(named, key=lambda row: -sum(costs[sample] for sample in row)))
    return dealt


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
