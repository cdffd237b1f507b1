"""`mlpipe report RUN`: one page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlpipe.cli.session import CliSession, check_suffix, ignore_not_found, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write: .html, .md or .xml (JUnit). Default: report.html in the run's folder of the store.",
)
@ignore_not_found
@shared
@click.pass_obj
def command(session: CliSession, run_id: str, out: Path | None, ignore_not_found: bool) -> None:
    """Write one self-contained HTML page about a run (or, to a .md file, a summary in Markdown; to a
    .xml file, its stages as a JUnit report)."""
    from mlpipe.api.reporting import view_of_page
    from mlpipe.observe.junit import build_junit
    from mlpipe.observe.report import build_markdown, write_report
    from mlpipe.observe.runview import view_run
    from mlpipe.store import runs

    check_suffix(out, ".html", ".md", ".xml")
    store = session.store_if_claimed(run_id, ignore_not_found=ignore_not_found)
    if store is None:
        return
    if store.exists(f"runs/{run_id}/run.json") and (run := runs.read_run(store, run_id)).is_sweep:
        from mlpipe.observe.sweep_report import write_report as write_sweep

        if out is not None and out.suffix.lower() != ".html":
            raise click.UsageError("of a sweep there is a page, --out FILE.html; of its trials all of them")
        where = write_sweep(store, run, out)
        session.result({"report": where}, where)
        return
    short = {".md": build_markdown, ".xml": build_junit}
    if out is not None and (build := short.get(out.suffix.lower())) is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(build(store, run_id), encoding="utf-8")
        where = str(out)
        view = view_run(store, run_id) if session.json else None
    else:
        view = view_of_page(store, run_id)
        where = write_report(store, view, out)
    document: dict[str, Any] = {"report": where}
    if session.json and view is not None:
        document["goodput"] = view.goodput()
    session.result(document, where)
