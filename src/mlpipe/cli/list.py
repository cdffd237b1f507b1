"""`mlpipe list`: the runs of a store, from its index alone."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from mlpipe._core.units import format_seconds
from mlpipe.cli.outcome import colour
from mlpipe.cli.session import Session, shared


@click.command()
@shared
@click.pass_obj
def command(session: Session) -> None:
    """List the runs of a store, the newest last."""
    from mlpipe.store import runs

    store = session.open_store()
    found = runs.list_runs(store)
    width = max([len(run.run_id) for run in found], default=3)
    now = time.time()
    lines = [f"{'RUN'.ljust(width)}  {'STATE':9}  {'STARTED':>10}  {'CHANGED':>10}"]
    for run in found:
        started, changed = (format_seconds(max(now - at, 0)) + " ago" for at in (run.created, run.updated))
        lines.append(
            f"{run.run_id.ljust(width)}  {colour(run.state)}{'':{9 - len(run.state)}}  "
            f"{started:>10}  {changed:>10}"
        )
    text = "\n".join(lines) if found else f"no runs in {store.url}"
    session.result({"store": store.url, "runs": [asdict(run) for run in found]}, text)
