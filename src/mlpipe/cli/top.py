"""`mlpipe top [RUN]`: the runs of a store, or the ranks of one training, as they go."""

from __future__ import annotations

import shutil
import sys
import time

import click

from mlpipe._core.printable import printable
from mlpipe.cli.session import CliSession, shared


@click.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@click.option("--once", is_flag=True, help="Print the table once, as is done where there is no terminal.")
@click.option("--interval", type=click.FloatRange(min=0.5), default=2.0, show_default=True, help="Seconds.")
@shared
@click.pass_obj
def command(session: CliSession, run_id: str | None, once: bool, interval: float) -> None:
    """Show the runs of a store, or the ranks of RUN with what each spends its steps on and how slow it is
    beside the others. Ctrl-C ends it."""
    from mlpipe.observe.top import Top, ranks_table, runs_table

    store = session.open_store() if run_id is None else session.store_of(run_id)
    top = Top(store)
    live = not (once or session.json) and sys.stdout.isatty()
    try:
        while True:
            columns, height = shutil.get_terminal_size()
            if run_id is None:
                listed = top.runs(height - 2 if live else 50)
                lines = runs_table(listed, time.time()) if listed else [f"no runs in {store.url}"]
                document = [row.document() for row in listed]
            else:
                ranks = top.ranks(run_id)
                lines = (
                    ranks_table(ranks, time.time()) if ranks else [f"no step of {run_id} was recorded yet"]
                )
                document = [row.document() for row in ranks]
            if not live:
                session.result(document, "\n".join(lines))
                return
            shown = "".join(f"{printable(line[:columns])}\x1b[K\n" for line in lines[: height - 1])
            click.echo(f"\x1b[H{shown}\x1b[J", nl=False)
            time.sleep(interval)
    except KeyboardInterrupt:
        click.echo()
