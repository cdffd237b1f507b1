"""`mlpipe list`: the runs of a store, from its index, and of those under way whether anybody drives them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import StoreError
from mlpipe._core.units import format_seconds
from mlpipe.cli.outcome import colour
from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunSummary


@click.command()
@click.option(
    "--where",
    metavar="EXPRESSION",
    help="Only runs of which it holds, like 'state == done and train.lr < 1e-3'.",
)
@click.option("--sort", metavar="FIELD", help="By a field, like val_loss; -val_loss: from above.")
@shared
@click.pass_obj
def command(session: CliSession, where: str | None, sort: str | None) -> None:
    """List the runs of a store, the newest last.

    Fields of --where and --sort: keys of the pipeline as --set takes them, or shorter where that is clear
    (train.lr); metrics (val_loss, loss, step, tokens_per_second, mfu_ratio); run, state, created, updated,
    seconds, pipeline, backend, user, host, git_commit, message. Each that is named becomes a column. What
    the index does not tell is read of every run.
    """
    from mlpipe.store import runs

    store = session.open_store()
    values: dict[str, dict[str, Any]] = {}
    if where is None and sort is None:
        summaries = runs.list_runs(store)
    else:
        from mlpipe.api.listing import OF_INDEX, select

        listed = select(store, where, sort, session.note)
        summaries = [one.summary for one in listed]
        values = {
            one.summary.run_id: {name: value for name, value in one.values.items() if name not in OF_INDEX}
            for one in listed
        }
    width = max([3, *(len(run.run_id) for run in summaries)])
    now = time.time()
    notes = {run.run_id: _note(store, run) for run in summaries}
    columns = _columns(values)
    head = f"{'RUN'.ljust(width)}  {'STATE':9}  {'STARTED':>10}  {'CHANGED':>10}"
    lines = [head + "".join(f"  {name.rjust(wide)}" for name, wide in columns.items())]
    for run in summaries:
        started, changed = (format_seconds(max(now - at, 0)) + " ago" for at in (run.created, run.updated))
        own = values.get(run.run_id, {})
        cells = "".join(f"  {_cell(own.get(name)).rjust(wide)}" for name, wide in columns.items())
        lines.append(
            f"{run.run_id.ljust(width)}  {colour(run.state)}{'':{9 - len(run.state)}}  "
            f"{started:>10}  {changed:>10}{cells}  {notes[run.run_id]}".rstrip()
        )
    nothing = f"no runs in {store.url}" + ("" if where is None else f" of which this holds: {where}")
    text = "\n".join(lines) if summaries else nothing
    document = [
        {**asdict(run), "note": notes[run.run_id]}
        | ({"values": values[run.run_id]} if run.run_id in values else {})
        for run in summaries
    ]
    session.result({"store": store.url, "runs": document}, text)


def _columns(values: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Each with its width."""
    names = list(dict.fromkeys(name for own in values.values() for name in own))
    return {name: max(len(name), *(len(_cell(own.get(name))) for own in values.values())) for name in names}


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)[:40]


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
