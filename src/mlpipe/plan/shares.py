"""How much of each batch a rank computes, by how fast each was measured to be: pure functions of what all
ranks have heard, so that all of them decide alike."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from statistics import median

SLOW_RATIO = 1.2  # of the others' time for the same work: from here on a rank is slow
_WINDOW = 8  # steps between decisions, of which the median counts: one that stood still says nothing
_WORTH_RATIO = 1.05  # of the ideal step: who is within it is left alone
_LONG = 3  # windows in which a rank is slow before it is named
_LEAST_RATIO = 0.1  # of the fastest: the slowest rank goes on to be measured


def bounds(total: int, num_ranks: int, speeds: Sequence[float] | None = None) -> list[int]:
    """Rank `i` has those of `total` things from `bounds[i]` to `bounds[i + 1]`: as even as they can be, or
    such that ranks of these speeds are done at the same time, each with one at the least where there are
    enough."""
    if speeds is None:
        return [total * part // num_ranks for part in range(num_ranks + 1)]
    least, whole = int(total >= num_ranks), sum(speeds)
    counts = [max(least, int(total * speed / whole)) for speed in speeds]
    left = total - sum(counts)
    sign = 1 if left > 0 else -1  # whoever is done first gets one more, or who is done last one less
    after = [
        (sign * (count + (left > 0)) / speed, rank)
        for rank, (count, speed) in enumerate(zip(counts, speeds, strict=True))
        if left > 0 or count > least
    ]
    heapq.heapify(after)
    for _ in range(abs(left)):
        _, rank = heapq.heappop(after)
        counts[rank] += sign
        if left > 0 or counts[rank] > least:
            heapq.heappush(after, (sign * (counts[rank] + (left > 0)) / speeds[rank], rank))
    ends = [0]
    for count in counts:
        ends.append(ends[-1] + count)
    return ends


class Shares:
    """`speeds`: work that each rank does in the same time, 1 on the mean; None: all have equal shares.
    `slowness`: of each rank, its time for the same work over the median of the others; None: nobody knows
    yet. `expected`: speeds of machines that differ, by which they begin, and are judged."""

    def __init__(self, num_ranks: int, expected: Sequence[float] | None = None) -> None:
        self.speeds: list[float] | None = None if expected is None else list(expected)
        self._expected = expected or [1.0] * num_ranks
        self.slowness: list[float] | None = None
        self._heard: list[list[float]] = [[] for _ in range(num_ranks)]
        self._num_slow = [0] * num_ranks
        self._steps = 0

    def heard(self, seconds: Sequence[float]) -> None:
        """Of a step: what each rank took for a unit of its work; 0: it had none."""
        for told, one in zip(self._heard, seconds, strict=True):
            if one > 0:
                told.append(one)
        self._steps += 1
        if self._steps == _WINDOW:
            self._decide()
            self._heard = [[] for _ in seconds]
            self._steps = 0

    @property
    def stragglers(self) -> dict[int, float]:
        """Ranks that have been slow for long, and how slow they are."""
        if self.slowness is None:
            return {}
        return {rank: self.slowness[rank] for rank, num in enumerate(self._num_slow) if num >= _LONG}

    def _decide(self) -> None:
        known = [median(told) for told in self._heard if told]
        if not known:
            return
        usual = median(known)  # what is thought of a rank that had no work: it is tried again
        seconds = [median(told) if told else usual for told in self._heard]
        judged = [one * speed for one, speed in zip(seconds, self._expected, strict=True)]
        self.slowness = _over_others(judged)
        for rank, slow in enumerate(self.slowness):
            self._num_slow[rank] = self._num_slow[rank] + 1 if slow >= SLOW_RATIO else 0
        least = _LEAST_RATIO / min(seconds)
        rates = [max(least, 1 / one) for one in seconds]
        speeds = [rate * len(rates) / sum(rates) for rate in rates]
        now = self.speeds or [1.0] * len(speeds)
        # a step of ranks with these shares, over one of shares by speed
        if max(share / speed for share, speed in zip(now, speeds, strict=True)) > _WORTH_RATIO:
            self.speeds = speeds


class SharesOfStages:
    """Of ranks of which only those of one stage of a pipeline do the same work: each is compared with these,
    and one that is alone in its stage with nobody. `stages`: the ranks of each."""

    def __init__(self, stages: Sequence[Sequence[int]], expected: Sequence[float] | None = None) -> None:
        self._stages = [(ranks, Shares(len(ranks), expected)) for ranks in stages]

    def heard(self, seconds: Sequence[float]) -> None:
        """As `Shares.heard`, of all ranks."""
        for ranks, shares in self._stages:
            shares.heard([seconds[rank] for rank in ranks])

    @property
    def slowness(self) -> dict[int, float]:
        """By rank; empty: nobody knows yet."""
        return {
            rank: ratio
            for ranks, shares in self._stages
            for rank, ratio in zip(ranks, shares.slowness or (), strict=False)
        }

    @property
    def stragglers(self) -> dict[int, float]:
        """By rank."""
        return {ranks[at]: ratio for ranks, shares in self._stages for at, ratio in shares.stragglers.items()}


def _over_others(values: Sequence[float]) -> list[float]:
    """Each over the median of the rest; of one alone 1."""
    order = sorted(range(len(values)), key=lambda number: values[number])
    ordered = [values[number] for number in order]
    ratios = [1.0] * len(values)
    for place, number in enumerate(order):
        if rest := ordered[:place] + ordered[place + 1 :]:
            ratios[number] = values[number] / median(rest)
    return ratios
