"""`mlpipe run SPEC`: all stages here, in the foreground."""

from __future__ import annotations

import os

import click

from mlpipe.cli.session import Session, overrides, shared
from mlpipe.submit import backends
from mlpipe.submit.submission import Submission


@click.command()
@click.argument("spec", type=click.Path())
@overrides
@click.option("--run-id", metavar="ID", help="Name of the run. Default: pipeline, time and chance.")
@shared
@click.pass_obj
def command(session: Session, spec: str, overrides: tuple[str, ...], run_id: str | None) -> int:
    """Run a pipeline here, in the foreground.

    A pipeline with a `sweep` is run as `mlpipe sweep` does. Ctrl-C saves and stops, a second one stops at
    once; `mlpipe resume` goes on. Exits 0 when the run is done, 3 when it failed by its own code or its gate,
    4 for infrastructure, 5 when it was cancelled (also by SIGTERM), 130 after Ctrl-C.
    """
    from mlpipe.cli.foreground import drive_here
    from mlpipe.spec.load import read_pipeline
    from mlpipe.submit.adopt import create

    text, pipeline = read_pipeline(spec, overrides=overrides)
    store = session.open_store(pipeline.store)
    submission = Submission(spec, text, overrides, pipeline, store.url, os.getcwd(), run_id=run_id)
    backend = backends.load(backends.DEFAULT)({})
    if pipeline.sweep is not None:
        from mlpipe.cli import sweep

        return sweep.drive(session, store, sweep.create(session, store, backend, submission))
    run_id = create(store, backend, submission, session)
    session.note(f"run {run_id} in {store.url}")
    return drive_here(session, store, run_id)
