"""`mlpipe resume RUN`: goes on with a run; stages that are done are not repeated."""

from __future__ import annotations

import click

from mlpipe._core.errors import MlpipeError
from mlpipe.cli.session import Session, overrides, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@overrides
@click.option("--stage", metavar="NAME", help="Only this stage; what it needs must be done.")
@click.option(
    "--here",
    is_flag=True,
    help="As the driver's Job does: drive a cluster's run from this process, 0 once it has ended. With "
    "--stage: all stages that `submit --stage` asks for, on any backend.",
)
@shared
@click.pass_obj
def command(session: Session, run_id: str, overrides: tuple[str, ...], stage: str | None, here: bool) -> int:
    """Go on with a run that was stopped, failed, or lost its driver.

    Stages that are done stay done; training goes on from its last checkpoint, under another strategy or
    number of workers if --set says so. Exit codes are those of `mlpipe run`. A run that was submitted to a
    cluster goes on there; Ctrl-C leaves it running.
    """
    from mlpipe.cli import cluster, foreground
    from mlpipe.store import runs

    try:
        store = session.open_store()
        if runs.read_run(store, run_id).backend != "kubernetes":
            follow = here and stage is not None
            return foreground.drive_here(
                session, store, run_id, only=stage, for_followers=follow, overrides=overrides
            )
        if here:
            return foreground.drive_for_cluster(session, store, run_id, only=stage)
    except MlpipeError as error:
        if here and error.kind == "input":
            from mlpipe.submit.kubernetes import give_up_driver

            give_up_driver(run_id, stage)
        raise
    return cluster.resume(session, store, run_id, only=stage, overrides=overrides)
