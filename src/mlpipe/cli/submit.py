"""`mlpipe submit SPEC`: starts a run that outlives the terminal, or adopts one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES
from mlpipe.cli.backend_options import BackendChoice, WithBackendOptions
from mlpipe.cli.session import CliSession, interrupt, overrides, shared
from mlpipe.cli.submit_auto import AUTO, choose_place
from mlpipe.kinds import PHASES
from mlpipe.submit import backends
from mlpipe.submit.backend import Backend
from mlpipe.submit.delegate import Delegate
from mlpipe.submit.submission import Submission

if TYPE_CHECKING:
    from mlpipe.kinds import Phase
    from mlpipe.store.base import Store


@click.command(cls=WithBackendOptions, chosen_by="to", verb="submit")
@click.argument("spec", type=click.Path())
@click.option(
    "--to",
    type=BackendChoice(also=(AUTO,)),
    default=backends.DEFAULT,
    show_default=True,
    help="Where it runs; `auto`: at the best of your places.",
)
@click.option("--places", metavar="FILE", help="Of --to auto. Default: mlpipe/places.yaml of ~/.config.")
@click.option("--goal", type=click.Choice(["first", "cheapest"]), help="Of --to auto. Default: the file's.")
@overrides
@click.option("--stage", metavar="NAME", help="Only this stage; what it needs must be done.")
@click.option(
    "--phase",
    type=click.Choice(PHASES),
    help="Only the stages of this phase, in turn; with --run-id and --wait.",
)
@click.option("--run-id", metavar="ID", help="Name of the run; one that exists is adopted.")
@click.option("--wait", is_flag=True, help="Follow the run and exit as it does. Ctrl-C only detaches.")
@click.option(
    "--dry-run",
    type=click.Choice(["client", "server"]),
    is_flag=False,
    flag_value="client",
    help="Print what would be started, and start nothing; `server`: after the cluster has checked it.",
)
@shared
@click.pass_obj
def command(
    session: CliSession,
    spec: str,
    to: str,
    places: str | None,
    goal: str | None,
    options: dict[str, Any],
    overrides: tuple[str, ...],
    stage: str | None,
    phase: Phase | None,
    run_id: str | None,
    wait: bool,
    dry_run: str | None,
) -> int:
    """Start a run in the background and print its id.

    With --wait, exits as `mlpipe run` does; without, 0 when the run has a driver. A run that goes to Jenkins
    is made by the build; with --wait its log is shown and its result is the exit code: 0 SUCCESS, 5 ABORTED,
    3 any other. A pipeline with a `sweep` starts its trials, followed by a process on this machine.

    With --to auto the places of a file are asked when the run could begin there, what it would take and cost,
    and the best one has it; --dry-run shows what they say. A run that is there goes on where it is.
    """
    from mlpipe.spec.load import read_pipeline

    if to != AUTO and (places or goal):
        raise click.UsageError(f"--places and --goal are for --to {AUTO}")
    if to == AUTO and phase is not None:
        raise click.UsageError(f"--phase is not for --to {AUTO}")
    chosen = backends.load(to) if to != AUTO else None
    if chosen is not None and dry_run == "server" and not chosen.has_server_dry_run:
        able = [name for name in backends.TABLE if backends.load(name).has_server_dry_run]
        raise click.UsageError(f"--dry-run=server is for --to {' and '.join(able)}")
    text, pipeline = read_pipeline(spec, overrides=overrides)
    submission = Submission(
        spec=spec,
        text=text,
        overrides=overrides,
        pipeline=pipeline,
        store_url=session.full_store_url(pipeline.store),
        folder=os.getcwd(),
        stage=stage,
        run_id=run_id,
    )
    if chosen is None:
        if pipeline.sweep is not None:
            raise click.UsageError("--to auto is of one run: with --set sweep=null")
        placed = choose_place(session, submission, places, goal, only_look=dry_run is not None)
        if placed is None:
            return 0
        backend, submission = placed
        pipeline = submission.pipeline
    else:
        backend = chosen.of_submission(pipeline, options)
    if pipeline.sweep is not None:
        if wait or stage or phase or dry_run:
            raise click.UsageError(
                "of a pipeline with a sweep: --wait is `mlpipe sweep`; --stage, --phase and --dry-run are of "
                "one run, with --set sweep=null"
            )
        return _submit_sweep(session, backend, submission)
    if isinstance(backend, Delegate) and (stage is not None or phase is not None):
        raise click.UsageError(f"--stage and --phase are not for --to {backend.name}")
    if phase is not None and (run_id is None or not wait or stage or dry_run or session.json):
        raise click.UsageError(
            "--phase needs --run-id and --wait, and goes with none of --stage, --dry-run, --output json"
        )
    if dry_run is not None:
        preview = backend.preview(submission, session, on_server=dry_run == "server")
        session.result(preview.document, preview.text, as_it_is=True)
        return 0
    store = session.open_store(pipeline.store)
    if isinstance(backend, Delegate):
        return _hand_over(session, store, backend, submission, wait)
    if phase is None:
        return _start(session, store, backend, submission, wait)
    return _start_phase(session, store, backend, submission, phase)


def _submit_sweep(session: CliSession, backend: Backend, submission: Submission) -> int:
    """Its controller is a process on this machine, wherever its trials run."""
    from mlpipe.cli.sweep import claim
    from mlpipe.submit.detach import detach_unless_driven

    store = session.open_store(submission.pipeline.store)
    sweep_id = claim(session, store, backend, submission)
    detach_unless_driven(store, sweep_id)
    session.result({"sweep_id": sweep_id, "store": store.url}, sweep_id)
    session.note(f"see it with `mlpipe status {sweep_id}`, stop it with `mlpipe cancel {sweep_id}`")
    return 0


def _start(session: CliSession, store: Store, backend: Backend, submission: Submission, wait: bool) -> int:
    from mlpipe.api.signals import finished_first
    from mlpipe.cli.wait import say_detached, wait_for
    from mlpipe.submit.adopt import DriveRequest, claim

    run_id = claim(store, backend, submission, session)
    is_started = False
    try:
        with finished_first():
            _say_if_ended(session, store, run_id)
            request = DriveRequest(backend, store, run_id, submission.pipeline, submission.stage, session)
            request.start_driver()
            is_started = True
        if wait:
            session.note(f"run {run_id} in {store.url}; Ctrl-C leaves it running")
            return wait_for(session, request)
        request.await_heard()
    except KeyboardInterrupt:
        if is_started:
            return say_detached(session, run_id)
        session.complain(f"run {run_id} may lack a driver; `mlpipe status {run_id}` says so, and what to do")
        return EXIT_CODES["interrupted"]
    session.result({"run_id": run_id, "store": store.url}, run_id)
    session.note(f"follow it with `mlpipe logs -f {run_id}`, stop it with `mlpipe cancel {run_id}`")
    return 0


def _start_phase(
    session: CliSession, store: Store, backend: Backend, submission: Submission, phase: Phase
) -> int:
    """Its stages in turn, each awaited, up to the first that does not end well."""
    from mlpipe.plan.phases import stages_of

    names = stages_of(submission.pipeline, phase)
    session.note(f"{phase}: {', '.join(names) or 'the pipeline has no such stage'}")
    for name in names:
        if code := _start(session, store, backend, replace(submission, stage=name), wait=True):
            return code
    return 0


def _hand_over(
    session: CliSession, store: Store, backend: Delegate, submission: Submission, wait: bool
) -> int:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # it detaches, as Ctrl-C does
        signal.signal(signal.SIGTERM, interrupt)
    try:
        done = backend.hand_over(submission, store, session, wait=wait)
    except KeyboardInterrupt:
        return EXIT_CODES["interrupted"]
    session.result(done.document, done.text)
    return 0 if done.failure is None else EXIT_CODES[done.failure]


def _say_if_ended(session: CliSession, store: Store, run_id: str) -> None:
    """An ended run is adopted, but never silently."""
    from mlpipe.store import runs

    run = runs.read_run(store, run_id)
    if run.state == "done":
        session.complain(f"run {run_id} is done already; nothing starts")
    elif run.state in runs.RUN_ENDED:
        session.complain(f"run {run_id} {run.state} before ({run.message}); it goes on where it stopped")
