"""What samples that differ in length make of a training: how many rows they are, how long the ranks compute,
and for which share of it they wait for each other. It is what the trainer's own way to deal them
(`plan/dealing.py`) makes of steps drawn from the data's lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from mlpipe.plan.dealing import (
    Device,
    Mode,
    Work,
    cost_of_step,
    deal,
    deal_freely,
    idle_ratio,
    waits_of,
    work_of,
)
from mlpipe.plan.mesh import Mesh
from mlpipe.plan.settings import Communication

_BYTES_PER_TOKEN = 4.0  # of English, and a vocabulary of 32,000 or more
_TOKENS_PER_TURN = 5  # of a template, around what somebody says
_SMALL_BYTES, _PLACES = 4 * 2**20, 1024  # files are read whole, or a line at so many places
_MOST_LINE_BYTES = 2**20
_MOST_STEPS, _MOST_DRAWN = 16, 4096  # steps, and samples in all of them


@dataclass(frozen=True)
class Dealt:
    """A step, on the mean: rows of the rank that has the most, work until all ranks are done, and the share
    of it for which they wait."""

    num_rows: int
    work: float
    idle_ratio: float


class Uneven:
    """Samples of `lengths` tokens, so many a step (`global_batch`). `cost`: work of one, by its length.
    `weights`: how often each is drawn beside the others."""

    def __init__(
        self,
        lengths: Sequence[int],
        cost: Callable[[int], float],
        global_batch: int,
        packing: Mode,
        weights: Sequence[float] | None = None,
    ) -> None:
        self.lengths, self.cost, self.packing = lengths, cost, packing
        self.global_batch, self.weights = global_batch, weights
        self._known: dict[tuple[int, bool, int, Communication, Device], Dealt] = {}

    @cached_property
    def num_tokens(self) -> float:
        """Of a step, on the mean."""
        return fmean(map(sum, self._steps))

    def dealt(self, mesh: Mesh, capacity: int, communication: Communication, device: Device) -> Dealt:
        """`capacity`: tokens of a row. Time that bytes are on the way is none of it."""
        if mesh.ep > 1:  # who send each other rows have equally many
            communication = "collective"
        key = mesh.num_data_ranks, mesh.dp_shard > 1, capacity, communication, device
        if key not in self._known:
            steps = list(self._works(mesh.num_data_ranks, capacity, communication != "collective"))
            waits = waits_of(communication, mesh)
            rows = fmean(max(map(len, work)) for work in steps)
            work = fmean(cost_of_step(work, waits, device) for work in steps)
            self._known[key] = Dealt(round(rows), work, idle_ratio(steps, waits, device))
        return self._known[key]

    def idle(self, mesh: Mesh, capacity: int, communication: Communication, device: Device) -> float:
        """Share of the workers' time for which they wait."""
        return self.dealt(mesh, capacity, communication, device).idle_ratio

    def _works(self, num_ranks: int, capacity: int, freely: bool) -> Iterator[Work]:
        for lengths in self._steps:
            costs = [self.cost(length) for length in lengths]
            way = deal_freely if freely else deal
            yield work_of(way(lengths, costs, num_ranks, capacity, self.packing), costs)

    @cached_property
    def _steps(self) -> list[list[int]]:
        draw = random.Random(0)
        number = max(1, min(_MOST_STEPS, _MOST_DRAWN // self.global_batch))
        return [draw.choices(self.lengths, self.weights, k=self.global_batch) for _ in range(number)]


def lengths_of(path: str, seq_len: int) -> list[int]:
    """Tokens of the conversations in a file of JSON lines, cut to `seq_len`, as far as their text tells
    without a tokenizer; of a large file those at evenly spaced places. Empty where there is no such file.
    Lines that give no sample are the trainer's to refuse."""
    file = Path(path)
    if not file.is_file():
        return []
    try:
        lengths = (_length(line) for line in _lines(file))
        return [min(length, seq_len) for length in lengths if length]
    except OSError:
        return []


def _lines(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _SMALL_BYTES:
            yield from file
            return
        for place in range(_PLACES):
            file.seek(size * place // _PLACES)
            if place:
                file.readline(_MOST_LINE_BYTES)  # the rest of one
            yield file.readline(_MOST_LINE_BYTES)


def _length(line: bytes) -> int:
    """0: it gives no sample, or nobody knows."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(value, dict):
        return 0
    turns = value.get("messages")
    if not isinstance(turns, list):
        turns = [value.get(key) for key in ("prompt", "completion", "text") if key in value]
    num_bytes = sum(_bytes(turn) for turn in turns)
    return round(num_bytes / _BYTES_PER_TOKEN) + _TOKENS_PER_TURN * len(turns) if num_bytes else 0


def _bytes(value: Any) -> int:
    """Of text, wherever it lies in what somebody says."""
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    if isinstance(value, dict):
        return _bytes(value.get("content", value.get("text")))
    if isinstance(value, list):
        return sum(map(_bytes, value))
    return 0
