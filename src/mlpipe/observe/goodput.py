"""Goodput: where the rank-seconds of a training went, out of durable records alone. No I/O, no clock.

A rank-second is a second of one rank, or of the device that is kept for it, from the submission of the first
attempt to the end of the last. Each belongs to exactly one bucket, so the buckets sum to ranks x wall time,
over restarts and attempts (which may differ in their number of ranks). Only while an attempt is open, from
its submission to its end, a device is paid for.

The buckets stand in `buckets.py`. Goodput is the share of compute, communication and a pipeline's bubble of
steps that are kept: what a step takes where nothing goes wrong, well laid out or not, which MFU tells. The
rest is badput (after Google's ml-goodput-measurement, whose buckets these are, with queue, hang and bubble
added).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlpipe._core.records import End, Record, Save, Start, Step, Validation
from mlpipe.observe.buckets import BUCKETS, GOOD, NAMES, STOPPED

_OF_STEPS = {bucket.name: bucket.of_step for bucket in BUCKETS if bucket.of_step is not None}


@dataclass(frozen=True)
class Attempt:
    """One attempt of a stage; times in Unix seconds. `launched`: when its first launcher began, None if none
    did. `records`: by rank, of some or all of `num_ranks` ranks; those read stand for the others.
    `counting`: the ranks whose records say tokens; None: all."""

    submitted: float
    launched: float | None
    ended: float
    num_ranks: int
    records: Mapping[int, Sequence[Record]]
    hung: bool = False
    counting: frozenset[int] | None = None


@dataclass
class Ledger:
    """Rank-seconds by bucket, tokens of kept steps, and what a device-hour costs (None: nobody said).
    `parts`: of a sum; their prices may differ."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(NAMES, 0.0))
    tokens: float = 0.0
    price_usd_per_device_hour: float | None = None
    parts: tuple[Ledger, ...] = ()

    @property
    def total(self) -> float:
        """Rank-seconds, all buckets."""
        return sum(self.seconds.values())

    @property
    def paid(self) -> float:
        """Rank-seconds with a device."""
        return self.total - self.seconds[STOPPED]

    @property
    def goodput_ratio(self) -> float | None:
        """The share of good buckets; None of nothing."""
        return sum(self.seconds[name] for name in GOOD) / self.total if self.total else None

    @property
    def cost_usd(self) -> float | None:
        """Of all that was paid for; None without a price."""
        return self._usd(self.paid)

    @property
    def badput_usd(self) -> float | None:
        """Of that, what did not go into good buckets."""
        if self.parts and self.price_usd_per_device_hour is not None:
            return sum(part.badput_usd or 0.0 for part in self.parts)
        return self._usd(self.paid - sum(self.seconds[name] for name in GOOD))

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Of tokens whose steps are kept."""
        return None if self.cost_usd is None or not self.tokens else self.cost_usd / self.tokens * 1e6

    def _usd(self, seconds: float) -> float | None:
        price = self.price_usd_per_device_hour
        return None if price is None else seconds / 3600 * price

    def document(self) -> dict[str, Any]:
        """For `--output json`."""
        return {
            "rank_seconds": self.seconds,
            "total_rank_seconds": self.total,
            "paid_rank_seconds": self.paid,
            "goodput_ratio": self.goodput_ratio,
            "kept_tokens": self.tokens,
            "price_usd_per_device_hour": self.price_usd_per_device_hour,
            "cost_usd": self.cost_usd,
            "badput_usd": self.badput_usd,
            "usd_per_million_tokens": self.usd_per_million_tokens,
        }


def add(ledgers: Iterable[Ledger]) -> Ledger:
    """Their sum. The price is their mean by paid time, so that costs add up; None where one has none."""
    parts = tuple(ledgers)
    costs = [part.cost_usd for part in parts]
    whole = Ledger(parts=parts)
    for ledger in parts:
        whole.tokens += ledger.tokens
        for name in NAMES:
            whole.seconds[name] += ledger.seconds[name]
    if whole.paid and None not in costs:
        whole.price_usd_per_device_hour = sum(filter(None, costs)) / whole.paid * 3600
    return whole


def account(attempts: Sequence[Attempt], price_usd_per_device_hour: float | None = None) -> Ledger:
    """Of one stage. `attempts` in the order in which they were submitted."""
    ledger = Ledger(price_usd_per_device_hour=price_usd_per_device_hour)
    for number, attempt in enumerate(attempts):
        if number:
            ended = max(before.ended for before in attempts[:number])
            ledger.seconds[STOPPED] += attempt.num_ranks * max(attempt.submitted - ended, 0.0)
        read = {rank: list(records) for rank, records in attempt.records.items() if rank < attempt.num_ranks}
        weight = attempt.num_ranks / max(len(read), 1)
        counting = frozenset(range(attempt.num_ranks)) if attempt.counting is None else attempt.counting
        of_tokens = len(counting) / max(len(counting & read.keys()), 1)
        for rank, records in (read or {0: []}).items():
            later = [r for other in attempts[number + 1 :] for r in other.records.get(rank, ())]
            seconds, tokens = _rank(attempt, records, floor=_floor(later))
            ledger.tokens += of_tokens * tokens
            for name, spent in seconds.items():
                ledger.seconds[name] += weight * spent
    return ledger


def _floor(records: Iterable[Record]) -> float:
    """The first step that a later life went on from: what comes after it is lost."""
    starts = [record.start_step or 0 for record in records if isinstance(record, Start)]
    return min(starts, default=float("inf"))


class _Clock:
    """Cuts a rank's time into adjoining pieces: whatever the records say, the pieces fill the attempt."""

    def __init__(self, begin: float, end: float) -> None:
        self.at = begin
        self.end = max(begin, end)
        self.seconds = dict.fromkeys(NAMES, 0.0)

    def until(self, time: float) -> float:
        """Moves on, never back and never past the end; the seconds between."""
        before, self.at = self.at, min(max(self.at, time), self.end)
        return self.at - before

    def put(self, bucket: str, time: float) -> None:
        """The time up to `time` goes into `bucket`."""
        self.seconds[bucket] += self.until(time)


def _rank(attempt: Attempt, records: list[Record], floor: float) -> tuple[dict[str, float], float]:
    """Seconds of one rank by bucket, and the tokens of its kept steps."""
    clock = _Clock(attempt.submitted, attempt.ended)
    clock.put("queue", attempt.launched if attempt.launched is not None else attempt.ended)
    lives = _lives(records)
    tokens = 0.0
    for number, (start, life) in enumerate(lives):
        last = number == len(lives) - 1
        spawned = start.time - (start.seconds_since_spawn or 0.0)
        clock.put("startup" if number == 0 else "lost", spawned)
        starting = clock.until(start.time)
        restoring = min(start.restore_seconds or 0.0, starting)
        clock.seconds["restore"] += restoring
        clock.seconds["init"] += starting - restoring
        kept = min([floor, *(later.start_step or 0 for later, _ in lives[number + 1 :])])
        tokens += _steps(clock, start, life, kept)
        if last and attempt.hung:
            clock.put("hang", attempt.ended)
        elif life and isinstance(life[-1], End):
            clock.put("save", life[-1].time)  # the loop is over: it waits for its last save
        elif last:  # died; where it is still under way, the records end at `ended`
            clock.put("lost", attempt.ended)
    clock.put("idle" if lives else "startup", attempt.ended)
    return clock.seconds, tokens


def _lives(records: list[Record]) -> list[tuple[Start, list[Record]]]:
    """Each start record and what follows it, up to the next one."""
    lives: list[tuple[Start, list[Record]]] = []
    for record in records:
        if isinstance(record, Start):
            lives.append((record, []))
        elif lives:
            lives[-1][1].append(record)
    return lives


def _steps(clock: _Clock, start: Start, life: list[Record], kept: float) -> float:
    """Up to the last step of a life. Returns the tokens of steps up to `kept`.

    Where steps were left out (a long run is not read in full) a gap holds several, which are taken to be like
    the one that ends it. What a gap has beyond its steps is time between steps: a save that stood still there
    (its record says how long in all), else idle. A validation stands before the step that comes after it.
    """
    between = stalled = tokens = validating = 0.0
    before = start.start_step or 0
    for record in life:
        if isinstance(record, Save) and (record.step or 0) <= kept:
            stalled += record.stall_seconds or 0.0
        if isinstance(record, Validation) and (record.step or 0) <= kept:
            validating += record.seconds or 0.0
        if not isinstance(record, Step):
            continue
        num = max(record.step - before, 1)
        before = record.step
        clock.put("validate", min(clock.at + validating, record.time))
        validating = 0.0
        gap = clock.until(record.time)
        not_finite = record.loss is not None and math.isnan(record.loss)
        if record.step > kept or not_finite or record.skipped:  # the latter updated nothing
            clock.seconds["lost"] += gap
            continue
        tokens += num * (record.tokens or 0)
        parts = {name: num * max(of_step(record) or 0.0, 0.0) for name, of_step in _OF_STEPS.items()}
        known = sum(parts.values())
        shrink = gap / known if known > gap else 1.0
        for name, spent in parts.items():
            clock.seconds[name] += shrink * spent
        stalled -= shrink * parts["save"]
        between += gap - shrink * known
    clock.put("validate", clock.at + validating)  # behind the last step
    saving = min(max(stalled, 0.0), between)
    clock.seconds["save"] += saving
    clock.seconds["idle"] += between - saving
    return tokens
