"""`mlpipe resume RUN`: goes on with a run; stages that are done are not repeated."""

from __future__ import annotations

import click

from mlpipe._core.errors import MlpipeError
from mlpipe.cli.session import Session, overrides, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@overrides
@click.option(
    "--from-step",
    type=click.IntRange(min=0),
    metavar="N",
    help="Go on from this checkpoint of the training; later ones count no more. 0: begin anew.",
)
@click.option(
    "--allow-change",
    "allow",
    multiple=True,
    metavar="KEY",
    help="Go on though this setting makes another training of it, like train.seed. Repeatable.",
)
@click.option("--stage", metavar="NAME", help="Only this stage; what it needs must be done.")
@click.option(
    "--here",
    is_flag=True,
    help="As the driver's Job does: drive a cluster's run from this process, 0 once it has ended. With "
    "--stage: all stages that `submit --stage` asks for, on any backend.",
)
@click.option(
    "--trust-store",
    is_flag=True,
    help="Take what the store says of the run, though it is not what this machine submitted.",
)
@click.option(
    "--seal",
    metavar="SHA256:SHA256",
    help="As the driver's Job does: refuse a run whose pipeline.yaml or overrides have other digests.",
)
@shared
@click.pass_obj
def command(
    session: Session,
    run_id: str,
    overrides: tuple[str, ...],
    from_step: int | None,
    allow: tuple[str, ...],
    stage: str | None,
    here: bool,
    trust_store: bool,
    seal: str | None,
) -> int:
    """Go on with a run that was stopped, failed, or lost its driver.

    Stages that are done stay done; training goes on from its last sound checkpoint, under another strategy or
    number of workers if --set says so. A training that is done goes on with a higher train.steps, and what
    needs it is done again. What would make another training of it (its model, data or seed) is refused
    unless --allow-change names it. Exit codes are those of `mlpipe run`. A run that was submitted to a
    cluster goes on there; Ctrl-C leaves it running. What the store says of a run is compared with what this
    machine submitted; 2 if somebody changed it, with the keys that differ.
    """
    from mlpipe.cli import cluster, foreground
    from mlpipe.store import runs
    from mlpipe.submit.changes import Changes
    from mlpipe.submit.seal import kept

    changes = Changes(overrides, allow, from_step)
    try:
        store = session.store_of(run_id)
        if seal is not None:
            return foreground.drive_for_cluster(session, store, run_id, only=stage, digests=seal)
        run = runs.read_run(store, run_id)
        if not trust_store and (run.state != "done" or changes) and kept(store, run_id) is None:
            session.note(
                f"run {run_id} was not submitted from this machine: it goes on as the store says "
                f"(mlpipe spec {run_id} shows it)"
            )
        if run.backend != "kubernetes":
            return foreground.drive_here(
                session,
                store,
                run_id,
                only=stage,
                for_followers=here and stage is not None,
                changes=changes,
                trust_store=trust_store,
            )
        if here and changes:
            raise click.UsageError("what a cluster's run was asked for changes without --here")
        if here:
            return foreground.drive_for_cluster(session, store, run_id, only=stage)
    except MlpipeError as error:
        if here and error.kind == "input":
            from mlpipe.submit.kubernetes.driver_job import give_up_driver

            give_up_driver(run_id, stage)
        raise
    return cluster.resume(session, store, run_id, only=stage, changes=changes, trust_store=trust_store)
