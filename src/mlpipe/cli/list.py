"""`mlpipe list`: the runs of a store, from its index, and of those under way whether anybody drives them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from mlpipe._core.errors import StoreError
from mlpipe._core.units import format_seconds
from mlpipe.cli.outcome import colour
from mlpipe.cli.session import Session, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunSummary


@click.command()
@shared
@click.pass_obj
def command(session: Session) -> None:
    """List the runs of a store, the newest last."""
    from mlpipe.store import runs

    store = session.open_store()
    summaries = runs.list_runs(store)
    width = max([len(run.run_id) for run in summaries], default=3)
    now = time.time()
    notes = {run.run_id: _note(store, run) for run in summaries}
    lines = [f"{'RUN'.ljust(width)}  {'STATE':9}  {'STARTED':>10}  {'CHANGED':>10}"]
    for run in summaries:
        started, changed = (format_seconds(max(now - at, 0)) + " ago" for at in (run.created, run.updated))
        lines.append(
            f"{run.run_id.ljust(width)}  {colour(run.state)}{'':{9 - len(run.state)}}  "
            f"{started:>10}  {changed:>10}  {notes[run.run_id]}".rstrip()
        )
    text = "\n".join(lines) if summaries else f"no runs in {store.url}"
    document = [{**asdict(run), "note": notes[run.run_id]} for run in summaries]
    session.result({"store": store.url, "runs": document}, text)


def _note(store: Store, summary: RunSummary) -> str:
    """What the index does not tell of a run that is not over: one read each."""
    from mlpipe.store import leases, runs
    from mlpipe.submit import backends

    if summary.state == "claimed":
        return f"its client died: submit it again, or mlpipe cancel {summary.run_id}"
    if summary.state not in ("pending", "running"):
        return ""
    try:
        run = runs.read_run(store, summary.run_id)
    except StoreError:
        return ""
    if leases.undriven_since(run) is None:
        return ""
    verb = "status" if run.state == "pending" and backends.load(run.backend).has_own_driver else "resume"
    return f"nobody drives it: mlpipe {verb} {summary.run_id}"
