"""`mlpipe logs RUN`: what the stages wrote, on any machine, as it is written or long after."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES
from mlpipe._core.printable import printable
from mlpipe._core.units import parse_seconds
from mlpipe.cli.session import CliSession, interrupt, shared

if TYPE_CHECKING:
    from mlpipe.observe.logs import Line, LogFile, Reader
    from mlpipe.store.runs import RunState

_DRIVERLESS_SECONDS = 15.0  # between two drivers, as when a run is resumed
_POLL_SECONDS = 0.5  # of a folder; an S3 server is asked four times less often


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
    session: CliSession,
    run_id: str,
    follow: bool,
    stage: str | None,
    rank: int | None,
    since: float | None,
    tail: int | None,
) -> int:
    """Print the logs of a run's latest attempts: each line with its stage when there are several, and with
    its rank when a stage has several workers."""
    from mlpipe.store import runs, sweeps
    from mlpipe.submit import backends

    if session.json and follow:
        raise click.UsageError("--follow prints lines as they come; leave --output json away")
    store = session.store_of(run_id)
    if (request := backends.awaited(store, run_id)) is not None:
        status = request.status()
        session.result({**status, "logs": []}, f"no logs yet: {request.text(status)}")
        return 0
    if (trial := sweeps.unbegun(store, run_id)) is not None:
        document = {"run_id": run_id, "state": trial[0], "waits_for": trial[1], "logs": []}
        session.result(document, f"no logs: {trial[1]}")
        return 0
    run = runs.read_run(store, run_id)
    if run.is_sweep:
        first = sweeps.trial_run_id(run_id, next(iter(run.stages)))
        raise click.UsageError(f"a sweep prints nothing, its trials do: mlpipe logs {first}")
    if stage is not None and stage not in run.stages:
        raise click.UsageError(f"run {run_id} has no stage {stage!r}; it has {', '.join(run.stages)}")
    after = None if since is None else time.time() - since
    reader = backends.logs(store, run, stage=stage, rank=rank, after=after)
    logs = [
        (file, lines[max(len(lines) - tail, 0) :] if tail is not None else lines)
        for file, lines in reader.read(run, rest=not follow)
    ]
    if session.json:
        session.result({"run_id": run_id, "logs": [_document(*one) for one in logs]}, "")
        return 0
    many = stage is None and len(run.stages) > 1
    if not follow:
        if not logs:
            of = "" if rank is None else f" of rank {rank}"
            session.note(f"run {run_id} has no log{of} (yet)")
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


def _follow(session: CliSession, reader: Reader, run: RunState, many: bool) -> None:
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


def _document(file: LogFile, lines: list[Line]) -> dict[str, Any]:
    text = b"".join(line.text for line in lines).decode(errors="replace")
    return {"stage": file.stage, "attempt": file.attempt, "rank": file.rank, "text": text}


def _write(logs: Iterable[tuple[LogFile, list[Line]]], many: bool) -> None:
    from mlpipe.observe.logs import merged

    data = b"".join(merged(logs, several_stages=many))
    if sys.stdout.isatty():  # into a file or a pipe goes what was written; \r is of progress bars
        data = b"\r".join(printable(part.decode(errors="replace")).encode() for part in data.split(b"\r"))
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
