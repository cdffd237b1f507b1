"""Reads the records of a stage back: as one timeline over attempts and restarts, or as they grow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mlpipe._core.record_lines import decode_line, parse
from mlpipe._core.records import Evaluation, Record, Save, Start, Step, Validation
from mlpipe.store.base import Store

_RANK = re.compile(r"rank-(\d+)\.jsonl")
_ATTEMPT = re.compile(r"attempt-(\d+)/?")
_STEP = b'"kind": "step"'


def list_attempts(store: Store, stage_key: str) -> list[int]:
    """Numbers of the attempts that left anything in the store, ascending."""
    names = (info.key.rsplit(f"{stage_key}/", 1)[-1] for info in store.list(f"{stage_key}/", recursive=False))
    return sorted({int(match.group(1)) for name in names if (match := _ATTEMPT.match(name))})


def list_ranks(store: Store, attempt_key: str) -> list[int]:
    """Ranks that wrote records, ascending."""
    keys = store.list_logs(f"{attempt_key}/records/")
    return sorted(int(match.group(1)) for key in keys if (match := _RANK.search(key)))


def records_key(attempt_key: str, rank: int) -> str:
    """Of a rank's file of records."""
    return f"{attempt_key}/records/rank-{rank}.jsonl"


def read_records(store: Store, attempt_key: str, rank: int, *, max_steps: int | None = None) -> list[Record]:
    """All records of one rank in the order written; none if it wrote none.

    `max_steps`: of more step records than that, about so many are parsed, evenly spaced and the last one
    among them. Reading every line of every rank of a long run would take minutes.
    """
    data, _ = store.read_log(records_key(attempt_key, rank))
    lines = data.split(b"\n")
    if max_steps is not None:
        lines = _thin(lines, max_steps)
    try:
        values = json.loads(b"[" + b",".join(filter(None, lines)) + b"]")  # all at once: twice as fast
    except (ValueError, RecursionError):
        return decode_lines(lines)
    return [record for value in values if (record := parse(value)) is not None]


def decode_lines(lines: Iterable[bytes]) -> list[Record]:
    """The records among them; torn and foreign lines are skipped."""
    return [record for line in lines if (record := decode_line(line)) is not None]


def _thin(lines: list[bytes], max_steps: int) -> list[bytes]:
    steps = [index for index, line in enumerate(lines) if _STEP in line[:40]]
    stride = -(-len(steps) // max_steps)
    if stride <= 1:
        return lines
    dropped = set(steps) - set(steps[::stride]) - {steps[-1]}
    return [line for index, line in enumerate(lines) if index not in dropped]


class Follower:
    """New records of one rank since the last `poll`, without reading anything twice."""

    def __init__(self, store: Store, attempt_key: str, rank: int = 0) -> None:
        self._store = store
        self._key = records_key(attempt_key, rank)
        self._offset = 0
        self._rest = b""  # a line that was still being written

    def poll(self) -> list[Record]:
        """What was written since; a line that is still being written comes next time. Raises StoreError."""
        data, self._offset = self._store.read_log(self._key, offset=self._offset)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return decode_lines(lines)


@dataclass
class Timeline:
    """What one rank did that still holds, over all attempts and restarts.

    `starts`, `others`: with the number of their attempt. `steps`: ascending and without gaps of our making,
    each as it was done last; likewise `validations`. `num_rolled_back`: steps done and lost again, because a
    later start went on from before them.
    """

    starts: list[tuple[int, Start]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    num_rolled_back: int = 0
    saves: list[Save] = field(default_factory=list)
    validations: list[Validation] = field(default_factory=list)
    evaluation: Evaluation | None = None
    others: list[tuple[int, Record]] = field(default_factory=list)  # signal, end, saves that failed


def merge(attempts: Mapping[int, Iterable[Record]]) -> Timeline:
    """`attempts`: records of one rank by number of the attempt, each in the order written."""
    timeline = Timeline()
    for attempt in sorted(attempts):
        for record in attempts[attempt]:
            match record:
                case Start():
                    timeline.starts.append((attempt, record))
                    _roll_back(timeline, record.start_step or 0)
                case Step():
                    _roll_back(timeline, record.step - 1)
                    timeline.steps.append(record)
                case Save(error=None):
                    timeline.saves.append(record)
                case Validation():
                    _drop_validations(timeline, (record.step or 0) - 1)
                    timeline.validations.append(record)
                case Evaluation():
                    timeline.evaluation = record
                case _:
                    timeline.others.append((attempt, record))
    return timeline


def _drop_validations(timeline: Timeline, last_kept: int) -> None:
    while timeline.validations and (timeline.validations[-1].step or 0) > last_kept:
        timeline.validations.pop()


def _roll_back(timeline: Timeline, last_kept: int) -> None:
    _drop_validations(timeline, last_kept)
    while timeline.steps and timeline.steps[-1].step > last_kept:
        timeline.steps.pop()
        timeline.num_rolled_back += 1
