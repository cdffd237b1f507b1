"""Runs beside each other, in Python: the same as `mlpipe compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlpipe.api.run import Run
from mlpipe.api.table import Table
from mlpipe.observe.compare import Comparison, build_page, compare_runs


def compare(runs: Sequence[Run | str], *, every: bool = False, page: str | Path | None = None) -> Table:
    """A row each thing in which the runs differed, and each that came of them: `group`, `key`, and a value a
    run by its id (None: it has none). `every`: also the rows in which they are alike. `page`: an HTML file to
    write, with their curves over each other. Raises StoreError for a run that is not there."""
    comparison = compared([run if isinstance(run, Run) else Run(run) for run in runs])
    if page is not None:
        write_page(comparison, Path(page))
    shown = comparison.shown(every=every)
    return Table(
        {"group": row.group, "key": row.key, **dict(zip(comparison.run_ids, row.values, strict=True))}
        for row in shown
    )


def compared(runs: Sequence[Run]) -> Comparison:
    """Raises StoreError."""
    return compare_runs([(run.opened, run.id) for run in runs])


def write_page(comparison: Comparison, out: Path) -> None:
    """Makes its folder, too."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(build_page(comparison), encoding="utf-8")
