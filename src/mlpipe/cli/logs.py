"""`mlpipe logs RUN`: what the stages wrote, on any machine, as it is written or long after."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from mlpipe.cli.outcome import in_order
from mlpipe.cli.session import Session, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState

_DRIVERLESS_SECONDS = 15.0  # between two drivers, as when a run is resumed
_LOG_NAME = re.compile(r"(rank-([0-9]+)|launcher)\.log")


@dataclass
class LogFile:
    """`rank` is None for the launcher's log, which has the lines of every rank of its node."""

    key: str
    stage: str
    attempt: int
    rank: int | None
    offset: int = 0
    torn: bytes = b""  # a line that was still being written when we last looked

    def read(self, store: Store) -> bytes:
        """What is new, in whole lines."""
        data, self.offset = store.read_log(self.key, offset=self.offset)
        whole, newline, self.torn = (self.torn + data).rpartition(b"\n")
        return whole + newline


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--follow", "-f", is_flag=True, help="Go on until the run has ended.")
@click.option("--stage", metavar="NAME", help="Only of this stage.")
@click.option("--rank", type=click.IntRange(min=0), help="Only of this worker.")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Only the last N lines of each log.")
@shared
@click.pass_obj
def command(
    session: Session, run_id: str, follow: bool, stage: str | None, rank: int | None, tail: int | None
) -> None:
    """Print the logs of a run's latest attempts, each line with its stage when there are several."""
    from mlpipe.store import runs

    if session.json and follow:
        raise click.UsageError("--follow prints lines as they come; leave --output json away")
    store = session.open_store()
    run = runs.read_run(store, run_id)
    if stage is not None and stage not in run.stages:
        raise click.UsageError(f"run {run_id} has no stage {stage!r}; it has {', '.join(run.stages)}")
    files = {file.key: file for file in find(store, run, stage, rank)}
    texts = {
        key: _tail(file.read(store) + (b"" if follow else file.torn), tail) for key, file in files.items()
    }
    if session.json:
        logs = [
            {
                "stage": file.stage,
                "attempt": file.attempt,
                "rank": file.rank,
                "text": texts[key].decode(errors="replace"),
            }
            for key, file in files.items()
        ]
        session.result({"run_id": run_id, "logs": logs}, "")
        return
    many = stage is None and len(run.stages) > 1
    for key, file in files.items():
        _write(file, texts[key], many)
    if not follow:
        return
    driven = time.monotonic()
    while run.state not in runs.RUN_ENDED:
        time.sleep(0.5)
        run = runs.read_run(store, run_id)  # before the logs: what was written until it ended is shown
        for found in find(store, run, stage, rank):
            file = files.setdefault(found.key, found)
            _write(file, file.read(store), many)
        if runs.lease_is_live(run.driver):
            driven = time.monotonic()
        elif time.monotonic() - driven > _DRIVERLESS_SECONDS:
            session.complain(f"nobody drives run {run_id}; go on with mlpipe resume {run_id}")
            break
    for file in files.values():
        _write(file, file.torn, many)


def find(store: Store, run: RunState, stage: str | None, rank: int | None) -> Iterator[LogFile]:
    for name, state in in_order(run).stages.items():
        if state.attempt == 0 or stage not in (None, name):
            continue
        folder = f"runs/{run.run_id}/stages/{name}/attempt-{state.attempt}/logs/"
        ranks = {
            int(match[2]) if match[2] else None: key
            for key in store.list_logs(folder)
            if (match := _LOG_NAME.fullmatch(key.removeprefix(folder)))
        }
        chosen = rank if rank is not None else None if None in ranks else 0
        if chosen in ranks:
            yield LogFile(ranks[chosen], name, state.attempt, chosen)


def _tail(text: bytes, count: int | None) -> bytes:
    lines = text.splitlines(keepends=True)
    return text if count is None else b"".join(lines[max(len(lines) - count, 0) :])


def _write(file: LogFile, text: bytes, many: bool) -> None:
    if not text:
        return
    if many:
        prefix = f"{file.stage} | ".encode()
        text = b"".join(prefix + line for line in text.splitlines(keepends=True))
    if not text.endswith(b"\n"):
        text += b"\n"
    sys.stdout.buffer.write(text)
    sys.stdout.buffer.flush()
