"""`mlpipe compare RUN RUN...`: in what runs differed, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlpipe.cli.session import CliSession, check_suffix, shared

if TYPE_CHECKING:
    from mlpipe.observe.compare import Comparison


@click.command()
@click.argument("run_ids", metavar="RUN RUN...", nargs=-1, required=True)
@click.option("--all", "every", is_flag=True, help="Also what they have in common.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="HTML file (.html) to write, with their curves.",
)
@shared
@click.pass_obj
def command(session: CliSession, run_ids: tuple[str, ...], every: bool, out: Path | None) -> None:
    """Show in what runs differed (pipeline key by key, code, data, hardware, plan, versions) and what came of
    it: losses, metrics, throughput, MFU, goodput, cost, time."""
    from mlpipe.api.comparing import compared, write_page
    from mlpipe.api.run import Run

    if len(set(run_ids)) < 2:
        raise click.UsageError("name two runs or more")
    check_suffix(out, ".html")
    comparison = compared([Run.of(session.store_of(run_id), run_id) for run_id in dict.fromkeys(run_ids)])
    lines = _lines(comparison, every=every)
    if out is not None:
        write_page(comparison, out)
        lines += ["", str(out)]
    for problem in comparison.problems:
        session.note(problem)
    document = {
        "runs": list(comparison.run_ids),
        "rows": [row.document() for row in comparison.shown(every=every)],
        "page": None if out is None else str(out),
    }
    session.result(document, "\n".join(lines))


def _lines(comparison: Comparison, *, every: bool) -> list[str]:
    from mlpipe._core.tables import aligned

    rows = comparison.shown(every=every)
    body = [("", *comparison.run_ids), *((row.key, *row.texts) for row in rows)]
    table = aligned(body, left=range(len(body[0])))
    lines, group = [table[0]], ""
    for row, line in zip(rows, table[1:], strict=True):
        if row.group != group:
            group = row.group
            lines += ["", click.style(group, bold=True)]
        lines.append(line)
    return lines
