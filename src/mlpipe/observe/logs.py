"""What the stages of a run wrote, out of the store alone: on any machine, as it is written or long after.

Logs of pods that are gone are there as well, and what a restarted gang writes goes on where the last one
ended. Ranks' logs have a time before each line (`train/logs.py`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from mlpipe._core.serial import read_json
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

_LOG_NAME = re.compile(r"(rank-([0-9]+)|launcher)\.log")
_STAMP = re.compile(rb"([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\.[0-9]{3}Z) ")


@dataclass
class Line:
    """`time`: Unix seconds; of a line without one, that of the line before it."""

    time: float
    text: bytes


class LogFile:
    """The log of one rank of an attempt, or (`rank` None) that of its launcher, which has the lines of all.
    `stamped`: its lines begin with their time. `several`: other ranks have logs beside it."""

    def __init__(
        self, key: str, stage: str, attempt: int, rank: int | None, *, stamped: bool, several: bool
    ) -> None:
        self.key, self.stage, self.attempt, self.rank = key, stage, attempt, rank
        self.prefix = f"[rank {rank}] ".encode() if several and rank is not None else b""
        self._stamped = stamped
        self._offset = 0
        self._torn = b""  # a line that was still being written when we last looked
        self._time: float | None = None

    def read(self, store: Store, otherwise: float) -> list[Line]:
        """What is new, in whole lines. `otherwise`: the time of lines before the first that says its own."""
        data, self._offset = store.read_log(self.key, offset=self._offset)
        whole, newline, self._torn = (self._torn + data).rpartition(b"\n")
        return [self._line(text, otherwise) for text in (whole + newline).splitlines(keepends=True)]

    def rest(self, otherwise: float) -> list[Line]:
        """The line that was never ended, if there is one."""
        torn, self._torn = self._torn, b""
        return [self._line(torn + b"\n", otherwise)] if torn else []

    def _line(self, text: bytes, otherwise: float) -> Line:
        if self._stamped and (match := _STAMP.match(text)):
            self._time, text = datetime.fromisoformat(match[1].decode()).timestamp(), text[match.end() :]
        return Line(otherwise if self._time is None else self._time, text)


class Reader:
    """The logs of a run, from its latest attempts on; each call of `read` gives what is new."""

    def __init__(self, store: Store, stage: str | None, rank: int | None, after: float | None = None) -> None:
        """`after`: Unix seconds of the first line that is wanted; None: all of them."""
        self.store = store
        self._stage, self._rank, self._after = stage, rank, after
        self._files: dict[str, LogFile] = {}
        self._plans: dict[str, dict[str, Any]] = {}
        self._attempts: dict[str, int] = {}  # by stage, the oldest that may still grow

    def read(self, run: RunState, *, rest: bool = False) -> list[tuple[LogFile, list[Line]]]:
        """Of each log what is new, in the order of stages, attempts and ranks. `rest`: lines that have not
        ended, too."""
        logs = []
        for name, state in run.stages.items():
            if state.attempt == 0 or self._stage not in (None, name):
                continue
            for attempt in range(self._attempts.get(name, state.attempt), state.attempt + 1):
                for file in self._find(run, name, attempt):
                    otherwise = state.ended or time.time()
                    lines = file.read(self.store, otherwise)
                    if rest or attempt < state.attempt:
                        lines += file.rest(otherwise)
                    if self._after is not None:
                        lines = [line for line in lines if line.time >= self._after]
                    logs.append((file, lines))
            self._attempts[name] = state.attempt
        return logs

    def _find(self, run: RunState, stage: str, attempt: int) -> Iterator[LogFile]:
        key = f"runs/{run.run_id}/stages/{stage}/attempt-{attempt}"
        ranks = {
            int(match[2]) if match[2] else None: path
            for path in self.store.list_logs(f"{key}/logs/")
            if (match := _LOG_NAME.fullmatch(path.rpartition("/")[2]))
        }
        if self._rank is not None:
            chosen: list[int | None] = [self._rank] if self._rank in ranks else []
        elif None in ranks and self._after is None:
            chosen = [None]
        else:
            chosen = [*sorted(rank for rank in ranks if rank is not None)]
        for rank in chosen:
            if ranks[rank] not in self._files:
                train = self._plan(key).get("command") is None
                several = train and self._rank is None and _has_several_workers(self._plan(key))
                self._files[ranks[rank]] = LogFile(
                    ranks[rank], stage, attempt, rank, stamped=train and rank is not None, several=several
                )
            yield self._files[ranks[rank]]

    def _plan(self, key: str) -> dict[str, Any]:
        """As JSON, since it may be of another version of mlpipe; empty where it is none: logs are there."""
        if key not in self._plans:
            path = f"{key}/plan.json"
            try:
                plan = read_json(self.store.get(path)) if self.store.exists(path) else {}
            except ValueError:
                plan = {}
            self._plans[key] = plan if isinstance(plan, dict) else {}
        return self._plans[key]


def _has_several_workers(plan: dict[str, Any]) -> bool:
    launch = plan.get("launch")
    counts = (launch.get("num_nodes"), launch.get("nproc_per_node")) if isinstance(launch, dict) else ()
    return any(isinstance(count, int) and count > 1 for count in counts)


def merged(logs: Iterable[tuple[LogFile, list[Line]]], *, several_stages: bool) -> Iterator[bytes]:
    """Stage after stage, the ranks of each by the time of their lines. `several_stages`: each line has its
    stage's name in front."""
    stages: dict[tuple[str, int], list[Line]] = {}
    for file, lines in logs:
        prefix = (f"{file.stage} | ".encode() if several_stages else b"") + file.prefix
        stages.setdefault((file.stage, file.attempt), []).extend(
            Line(line.time, prefix + line.text) for line in lines
        )
    for lines in stages.values():
        yield from (line.text for line in sorted(lines, key=lambda line: line.time))
