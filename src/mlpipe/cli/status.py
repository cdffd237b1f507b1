"""`mlpipe status RUN`: where a run and each of its stages stand."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.cli import outcome
from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe.observe.progress import Summary
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState


@click.command()
@click.argument("run_id", metavar="RUN")
@shared
@click.pass_obj
def command(session: CliSession, run_id: str) -> None:
    """Show where a run stands: its stages, the progress of its training, its last checkpoint."""
    from mlpipe.observe.members import in_words, members
    from mlpipe.observe.progress import live_line
    from mlpipe.store import leases, runs, sweeps
    from mlpipe.submit import backends

    store = session.store_of(run_id)
    if (request := backends.awaited(store, run_id)) is not None:
        status = request.status()
        session.result(status, request.text(status))
        return
    if (trial := sweeps.unbegun(store, run_id)) is not None:
        session.result({"run_id": run_id, "state": trial[0], "waits_for": trial[1]}, trial[1])
        return
    run = runs.read_run(store, run_id)
    if run.is_sweep:
        from mlpipe.cli.sweep import say

        say(session, store, run)
        return
    document = outcome.document(store, run)
    is_held = leases.lease_is_live(run.driver)
    document["driver_alive"] = is_held and run.driver is not None and not run.driver.deletes
    under_way = run.state not in runs.RUN_ENDED and run.message != runs.WAITS_FOR_STAGES
    if under_way and not is_held:
        document["waits_for"] = backends.of_run(run).why_undriven(store, run)
    for name, stage in document["stages"].items():
        stage["progress"] = progress(store, run, name)
        change = members(store, run.attempt_key(name)) if stage["progress"] is not None else None
        stage["members"] = None if change is None else {"numbers": change.members, "words": in_words(change)}
    session.result(document, _text(run, document, is_held, live_line))


def progress(store: Store, run: RunState, stage: str) -> Summary | None:
    """Out of rank 0's records of the latest attempt; None if it has none."""
    from mlpipe.observe.progress import summarize
    from mlpipe.observe.records import read_records

    records = read_records(store, run.attempt_key(stage), 0)
    return summarize(records) if records else None


def _text(run: RunState, document: dict[str, Any], is_held: bool, live_line: Any) -> str:
    now = time.time()
    lines = [f"{run.run_id}  {outcome.colour(run.state)}  started {format_seconds(now - run.created)} ago"]
    if run.message:
        lines.append(f"  {run.message}")
    if run.meta.get("jenkins_url"):
        lines.append(f"  made by {run.meta['jenkins_url']}")
    if document.get("waits_for"):
        lines.append(f"  {document['waits_for']}")
    if run.driver is not None and run.state not in ("done", "failed", "cancelled"):
        was = "" if is_held else "was "
        held = "held, to delete checkpoints," if run.driver.deletes else "driven"
        lines.append(f"  {was}{held} by process {run.driver.pid} on {run.driver.host}")
    starts = run.meta.get("init_from", {})
    for line, (name, stage) in zip(outcome.stage_lines(run), document["stages"].items(), strict=True):
        lines.append(f"  {line}")
        if (start := starts.get(name)) is not None:
            lines.append(f"      starts from {start['found']['words']}")
        if stage["progress"] is not None and stage["progress"]["step"] is not None:
            lines += [f"      {note}" for note in stage["progress"]["notes"]]
            lines.append(f"      {live_line(stage['progress'], width=100)}")
            lines += [f"      {name}: {url}" for name, url in stage["progress"]["trackers"].items() if url]
        if stage["members"] is not None:
            lines.append(f"      {stage['members']['words']}")
        if (last := stage["last_checkpoint"]) is not None:
            lines.append(
                f"      last checkpoint: step {last['step']}, {format_bytes(last['size_bytes'])}, "
                f"{format_seconds(max(now - last['time'], 0))} ago"
            )
    return "\n".join(lines)
