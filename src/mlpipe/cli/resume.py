"""`mlpipe resume RUN`: goes on with a run; stages that are done are not repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from mlpipe._core.errors import MlpipeError
from mlpipe.cli.session import CliSession, overrides, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState
    from mlpipe.submit.backend import Backend
    from mlpipe.submit.driver import DriveOptions


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
@click.option("--seen", type=int, hidden=True)  # of a detached driver, see `submit/detach.py`
@shared
@click.pass_obj
def command(
    session: CliSession,
    run_id: str,
    overrides: tuple[str, ...],
    from_step: int | None,
    allow: tuple[str, ...],
    stage: str | None,
    here: bool,
    trust_store: bool,
    seal: str | None,
    seen: int | None,
) -> int:
    """Go on with a run that was stopped, failed, or lost its driver.

    Stages that are done stay done; training goes on from its last sound checkpoint, under another strategy or
    number of workers if --set says so. A training that is done goes on with a higher train.steps, and what
    needs it is done again. What would make another training of it (its model, data or seed) is refused
    unless --allow-change names it. Exit codes are those of `mlpipe run`. A run that was submitted to a
    cluster goes on there; Ctrl-C leaves it running. What the store says of a run is compared with what this
    machine submitted; 2 if somebody changed it, with the keys that differ.
    """
    from mlpipe.cli import foreground
    from mlpipe.store import runs
    from mlpipe.submit import backends
    from mlpipe.submit.changes import Changes
    from mlpipe.submit.driver import DriveOptions
    from mlpipe.submit.seal import kept

    changes = Changes(overrides, allow, from_step)
    for_followers = here and stage is not None
    try:
        store = session.store_of(run_id)
        if seal is not None:
            options = DriveOptions(stage, for_followers=stage is not None, digests=seal)
            return foreground.drive_for_backend(session, store, run_id, options)
        run = runs.read_run(store, run_id)
        if run.is_sweep and run.state in runs.RUN_ENDED and seen not in (None, run.seq):
            return 0  # it was cancelled before its controller began
        if run.is_sweep:
            return _resume_sweep(session, store, run_id, bool(changes or stage or here), trust_store)
        if not trust_store and (run.state != "done" or changes) and kept(store, run_id) is None:
            session.note(
                f"run {run_id} was not submitted from this machine: it goes on as the store says "
                f"(mlpipe spec {run_id} shows it)"
            )
        backend = backends.of_run(run)
        options = DriveOptions(stage, for_followers, changes, trust_store=trust_store, seen=seen)
        if not backend.has_own_driver:
            return foreground.drive_here(session, store, run_id, options)
        if here and changes:
            raise click.UsageError("what a cluster's run was asked for changes without --here")
        if here:
            return foreground.drive_for_backend(session, store, run_id, options)
    except MlpipeError as error:
        if here and error.kind == "input":
            backends.give_up_driver(run_id, stage)
        raise
    return _go_on_there(session, store, run, backend, options)


def _resume_sweep(
    session: CliSession, store: Store, sweep_id: str, is_changed: bool, trust_store: bool
) -> int:
    from mlpipe.cli import sweep

    if is_changed:
        raise click.UsageError("a sweep goes on as it is; its trials can be changed, each by its own id")
    return sweep.drive(session, store, sweep_id, trust_store=trust_store)


def _go_on_there(
    session: CliSession, store: Store, run: RunState, backend: Backend, options: DriveOptions
) -> int:
    """The run gets a driver of its backend's, which is followed."""
    from mlpipe.api.resuming import go_on_there
    from mlpipe.cli.wait import say_detached, wait_for

    request = go_on_there(session, store, run, backend, options)
    try:
        return wait_for(session, request)
    except KeyboardInterrupt:
        return say_detached(session, run.run_id)
