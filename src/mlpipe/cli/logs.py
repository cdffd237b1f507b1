"""`mlpipe logs RUN`: what the stages wrote, on any machine, as it is written or long after.

It reads the store alone, so that logs of pods that are gone are there as well, and what a restarted gang
writes goes on where the last one ended. Ranks' logs have a time before each line (`train/logs.py`).
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES
from mlpipe._core.units import parse_seconds
from mlpipe.cli.session import Session, interrupt, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState

_DRIVERLESS_SECONDS = 15.0  # between two drivers, as when a run is resumed
_POLL_SECONDS = 0.5  # of a folder; an S3 server is asked four times less often
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


def _seconds(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended. Ctrl-C only detaches.")
@click.option("--stage", metavar="NAME", help="Only of this stage.")
@click.option("--rank", type=click.IntRange(min=0), help="Only of this worker.")
@click.option(
    "--since",
    metavar="DURATION",
    callback=_seconds,
    help="Only lines of the last `10 min`, `2 h`, ...; a command's have no times: all, if it ran then.",
)
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log.")
@shared
@click.pass_obj
def command(
    session: Session,
    run_id: str,
    follow: bool,
    stage: str | None,
    rank: int | None,
    since: float | None,
    tail: int | None,
) -> int:
    """Print the logs of a run's latest attempts: each line with its stage when there are several, and with
    its rank when a stage has several workers."""
    from mlpipe.store import runs
    from mlpipe.submit import backends

    if session.json and follow:
        raise click.UsageError("--follow prints lines as they come; leave --output json away")
    store = session.store_of(run_id)
    if (request := backends.awaited(store, run_id)) is not None:
        status = request.status()
        session.result({**status, "logs": []}, f"no logs yet: {request.text(status)}")
        return 0
    run = runs.read_run(store, run_id)
    if stage is not None and stage not in run.stages:
        raise click.UsageError(f"run {run_id} has no stage {stage!r}; it has {', '.join(run.stages)}")
    reader = Reader(store, stage, rank, after=None if since is None else time.time() - since)
    logs = [
        (file, lines[max(len(lines) - tail, 0) :] if tail is not None else lines)
        for file, lines in reader.read(run, rest=not follow)
    ]
    if session.json:
        session.result({"run_id": run_id, "logs": [_document(*one) for one in logs]}, "")
        return 0
    many = stage is None and len(run.stages) > 1
    if not follow:
        _write(logs, many)
        return 0
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, interrupt)
    try:
        _write(logs, many)
        _follow(session, reader, run, many)
    except KeyboardInterrupt:
        session.complain(f"detached; run {run_id} goes on. Come back with `mlpipe logs -f {run_id}`")
        return EXIT_CODES["interrupted"]
    return 0


def _follow(session: Session, reader: Reader, run: RunState, many: bool) -> None:
    from mlpipe.store import leases, runs

    store, driven = reader.store, time.monotonic()
    pause = _POLL_SECONDS if store.local_path("runs") is not None else 4 * _POLL_SECONDS
    while run.state not in runs.RUN_ENDED:
        time.sleep(pause)
        run = runs.read_run(
            store, run.run_id, known=True
        )  # before the logs: what was written until it ended is shown
        _write(reader.read(run), many)
        if leases.lease_is_live(run.driver):
            driven = time.monotonic()
        elif time.monotonic() - driven > _DRIVERLESS_SECONDS:
            session.complain(f"nobody drives run {run.run_id}; go on with mlpipe resume {run.run_id}")
            break
    _write(reader.read(run, rest=True), many)


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
                several = train and self._rank is None and _num_workers(self._plan(key)) > 1
                self._files[ranks[rank]] = LogFile(
                    ranks[rank], stage, attempt, rank, stamped=train and rank is not None, several=several
                )
            yield self._files[ranks[rank]]

    def _plan(self, key: str) -> dict[str, Any]:
        """As JSON, since it may be of another version of mlpipe."""
        if key not in self._plans:
            path = f"{key}/plan.json"
            self._plans[key] = json.loads(self.store.get(path)) if self.store.exists(path) else {}
        return self._plans[key]


def _num_workers(plan: dict[str, Any]) -> int:
    launch = plan.get("launch", {})
    return int(launch.get("num_nodes", 1) * launch.get("nproc_per_node", 1))


def _document(file: LogFile, lines: list[Line]) -> dict[str, Any]:
    text = b"".join(line.text for line in lines).decode(errors="replace")
    return {"stage": file.stage, "attempt": file.attempt, "rank": file.rank, "text": text}


def _write(logs: Iterable[tuple[LogFile, list[Line]]], many: bool) -> None:
    """Stage after stage, the ranks of each by the time of their lines."""
    stages: dict[tuple[str, int], list[Line]] = {}
    for file, lines in logs:
        prefix = (f"{file.stage} | ".encode() if many else b"") + file.prefix
        stages.setdefault((file.stage, file.attempt), []).extend(
            Line(line.time, prefix + line.text) for line in lines
        )
    for lines in stages.values():
        sys.stdout.buffer.write(b"".join(line.text for line in sorted(lines, key=lambda line: line.time)))
    sys.stdout.buffer.flush()
