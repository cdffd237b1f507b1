"""`mlpipe resume RUN`: goes on with a run; stages that are done are not repeated."""

from __future__ import annotations

import click

from mlpipe.cli.session import Session, overrides, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@overrides
@click.option("--stage", metavar="NAME", help="Only this stage; what it needs must be done.")
@shared
@click.pass_obj
def command(session: Session, run_id: str, overrides: tuple[str, ...], stage: str | None) -> int:
    """Go on with a run that was stopped, failed, or lost its driver.

    Stages that are done stay done; training goes on from its last checkpoint, under another strategy or
    number of workers if --set says so. Exit codes are those of `mlpipe run`.
    """
    from mlpipe.cli.foreground import drive_here

    return drive_here(session, session.open_store(), run_id, only=stage, overrides=overrides)
