"""`mlpipe submit SPEC`: starts a run that outlives the terminal, or adopts one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES, StoreError, SubmitError
from mlpipe.cli.session import Interrupt, Session, overrides, shared
from mlpipe.kinds import PHASES

_LET_GO_SECONDS = 10.0
_MAX_TAKEOVERS = 5  # by one who follows; a driver that ended just before it was asked counts as well

if TYPE_CHECKING:
    from mlpipe.kinds import Phase
    from mlpipe.spec.model import Pipeline
    from mlpipe.store.base import Store
    from mlpipe.store.runs import RunState


@click.command()
@click.argument("spec", type=click.Path())
@click.option(
    "--to",
    type=click.Choice(["local", "kubernetes", "jenkins"]),
    default="local",
    show_default=True,
    help="Where it runs.",
)
@click.option("--context", metavar="NAME", help="Of the kubeconfig. Default: its current one.")
@click.option("--job", metavar="FOLDER/JOB", help="Of Jenkins: what is built.")
@click.option(
    "--parameter",
    "parameters",
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the Jenkins job, besides RUN_ID, STORE and SPEC_DIGEST. Repeatable.",
)
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
    session: Session,
    spec: str,
    to: str,
    context: str | None,
    job: str | None,
    parameters: tuple[str, ...],
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
    3 any other.
    """
    from mlpipe.spec.load import load_pipeline

    if (to == "jenkins") != (job is not None) or (parameters and to != "jenkins"):
        raise click.UsageError("--to jenkins needs --job FOLDER/JOB; --job and --parameter are for it alone")
    pipeline = load_pipeline(spec, overrides=overrides)
    if job is not None:
        from mlpipe.cli import jenkins

        if stage is not None or phase is not None or context is not None or dry_run == "server":
            raise click.UsageError(
                "--stage, --phase, --context and --dry-run=server are not for --to jenkins"
            )
        return jenkins.submit(
            session, pipeline, job, _pairs(parameters), run_id, wait=wait, dry_run=dry_run is not None
        )
    if phase is None:
        return _start(session, to, spec, pipeline, context, overrides, stage, run_id, wait, dry_run)
    if run_id is None or not wait or stage is not None or dry_run is not None or session.json:
        raise click.UsageError(
            "--phase needs --run-id and --wait, and goes with none of --stage, --dry-run, --output json"
        )
    from mlpipe.plan.phases import stages_of

    names = stages_of(pipeline, phase)
    session.note(f"{phase}: {', '.join(names) or 'the pipeline has no such stage'}")
    for name in names:
        if code := _start(session, to, spec, pipeline, context, overrides, name, run_id, wait, dry_run):
            return code
    return 0


def _start(
    session: Session,
    to: str,
    spec: str,
    pipeline: Pipeline,
    context: str | None,
    overrides: tuple[str, ...],
    stage: str | None,
    run_id: str | None,
    wait: bool,
    dry_run: str | None,
) -> int:
    from mlpipe.submit.detach import detach

    if to == "kubernetes":
        from mlpipe.cli import cluster
        from mlpipe.submit import seal

        asked = cluster.Asked(spec, pipeline, seal.of_file(spec, overrides, to), stage, run_id, context)
        return cluster.preview(session, asked, dry_run) if dry_run else cluster.submit(session, asked, wait)
    if context is not None or dry_run == "server":
        raise click.UsageError("--context and --dry-run=server are for --to kubernetes")
    store = session.open_store(pipeline.store)
    if dry_run:
        document = would_start(store, pipeline, run_id or f"{pipeline.name[:40]}-RUN", stage)
        session.result(document, json.dumps(document, indent=2))
        return 0
    run_id = claim(store, pipeline, spec, overrides, run_id)
    say_if_ended(session, store, run_id)

    def start_driver() -> None:
        if ask(store, pipeline, run_id, stage):
            detach(store, run_id, stage)

    try:
        start_driver()
        if wait:
            session.note(f"run {run_id} in {store.url}; Ctrl-C leaves it running")
            return follow(session, store, run_id, stage, start_driver)
        await_heard(store, run_id, stage, start_driver)
    except KeyboardInterrupt:
        return say_detached(session, run_id)
    say_started(session, store, run_id)
    return 0


def _pairs(parameters: tuple[str, ...]) -> dict[str, str]:
    for parameter in parameters:
        if not parameter.partition("=")[1]:
            raise click.UsageError(f"--parameter {parameter!r} is not NAME=VALUE")
    return {name: value for name, _, value in (one.partition("=") for one in parameters)}


def say_started(session: Session, store: Store, run_id: str) -> None:
    session.result({"run_id": run_id, "store": store.url}, run_id)
    session.note(f"follow it with `mlpipe logs -f {run_id}`, stop it with `mlpipe cancel {run_id}`")


def say_if_ended(session: Session, store: Store, run_id: str) -> None:
    """An ended run is adopted, but never silently."""
    from mlpipe.store import runs

    run = runs.read_run(store, run_id)
    if run.state == "done":
        session.complain(f"run {run_id} is done already; nothing starts")
    elif run.state in runs.RUN_ENDED:
        session.complain(f"run {run_id} {run.state} before ({run.message}); it goes on where it stopped")


def say_detached(session: Session, run_id: str) -> int:
    session.complain(
        f"detached; run {run_id} goes on. See it with `mlpipe status {run_id}` or "
        f"`mlpipe logs -f {run_id}`, stop it with `mlpipe cancel {run_id}`"
    )
    return EXIT_CODES["interrupted"]


def would_start(store: Store, pipeline: Pipeline, run_id: str, only: str | None) -> dict[str, Any]:
    """The driver's argv, and of each stage the plan, argv and added environment that it would start."""
    from mlpipe.submit import planning
    from mlpipe.submit.detach import driver_argv
    from mlpipe.submit.local import command_line

    stages = []
    for plan in planning.preview(pipeline, store.url, run_id, os.getcwd()):
        if only not in (None, plan.stage):
            continue
        argv, env = None, None
        if plan.kind.runs != "driver":
            scratch = planning.scratch_folder(store, run_id) / f"{plan.stage}-{plan.attempt}"
            argv, env = command_line(plan, scratch)
        stages.append({"stage": plan.stage, "argv": argv, "env": env, "plan": plan.to_plain()})
    return {
        "run_id": run_id,
        "store": store.url,
        "driver": driver_argv(store.url, run_id, only),
        "stages": stages,
    }


def claim(
    store: Store,
    pipeline: Pipeline,
    spec: str,
    overrides: tuple[str, ...],
    run_id: str | None,
    cluster: dict[str, Any] | None = None,
) -> str:
    """A new run, or the one that has this id already, if it was asked for with the same pipeline."""
    from mlpipe.submit import planning

    if run_id is not None and is_there(store, run_id, pipeline):
        return run_id
    try:
        return planning.create(
            store,
            pipeline,
            spec=spec,
            overrides=overrides,
            folder=os.getcwd(),
            run_id=run_id,
            cluster=cluster,
        )
    except StoreError as error:
        # another branch of the build was quicker
        if run_id is None or error.kind != "input" or not is_there(store, run_id, pipeline):
            raise
        return run_id


def is_there(store: Store, run_id: str, pipeline: Pipeline) -> bool:
    """Whether the run exists. Raises SubmitError (input) if the run is of another pipeline."""
    from mlpipe.store import runs
    from mlpipe.submit import seal

    if not store.exists(f"runs/{run_id}/run.json"):
        return False
    seal.vouched(store, runs.read_run(store, run_id), pipeline)
    return True


def ask(store: Store, pipeline: Pipeline, run_id: str, only: str | None) -> bool:
    """Leaves word that the stage `only` is wanted, unless it is done or runs. Whether a driver must be
    started. Raises SubmitError (input) if the stage cannot start."""
    from mlpipe.store import leases, runs, wanted
    from mlpipe.submit import planning
    from mlpipe.submit.driver import check_needs

    run = runs.read_run(store, run_id, known=True)
    driven = leases.lease_is_live(run.driver)
    if only is None:
        return run.state != "done" and not driven
    check_needs(planning.needs(pipeline), run, only)
    state = run.stages[only].state
    if state != "done" and not (state == "running" and driven):
        wanted.ask(store, run_id, only)
    return state != "done" and not driven


def await_heard(
    store: Store,
    run_id: str,
    only: str | None,
    start_driver: Callable[[], None],
    is_driven: Callable[[], bool] = lambda: False,
) -> None:
    """For one who leaves: the driver may have ended just before it could hear that `only` is wanted."""
    from mlpipe.store import leases, runs, wanted

    deadline = time.monotonic() + _LET_GO_SECONDS
    while only is not None and wanted.is_asked(store, run_id, only) and time.monotonic() < deadline:
        if not leases.lease_is_live(runs.read_run(store, run_id, known=True).driver) and not is_driven():
            start_driver()
            return
        time.sleep(0.2)


def follow(
    session: Session,
    store: Store,
    run_id: str,
    only: str | None,
    start_driver: Callable[[], None],
    is_driven: Callable[[RunState], bool] = lambda run: False,
) -> int:
    """Until the run, or its stage `only`, has ended; its exit code. `is_driven`: whether a run that no live
    driver holds will have one again. If not, a stage that is still to be run gets one by `start_driver`."""
    from mlpipe.cli import outcome
    from mlpipe.cli.follow import Watcher
    from mlpipe.cli.foreground import report_of
    from mlpipe.store import leases, runs, wanted
    from mlpipe.submit.follower import Following

    terminated = False

    def detach(*_: object) -> None:  # as Ctrl-C does, but whoever comes next may take our place
        nonlocal terminated
        terminated = True
        raise Interrupt

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, detach)
    run = runs.read_run(store, run_id, known=True)
    watcher = Watcher(session, store, run, only)
    following = Following(store, run_id)
    before = run.state
    over_at: float | None = None
    num_takeovers = 0
    try:
        while True:
            watcher.watch(run)
            following.renew()
            driven, over = leases.lease_is_live(run.driver), _is_over(store, run, only)
            if over and only is not None:
                # A driver lets go when it has written how the run stands, unless others keep it.
                over_at = over_at or time.monotonic()
                busy = any(stage.state == "running" for stage in run.stages.values())
                driven = driven and not busy and time.monotonic() - over_at < _LET_GO_SECONDS
            if not driven and (over or not is_driven(run)):
                if only is not None and run.state == "cancelled" != before:  # just before we asked
                    wanted.take(store, run_id, [only])
                    over = True
                if over or only is None or num_takeovers == _MAX_TAKEOVERS:
                    break
                if num_takeovers:
                    session.note(f"run {run_id} has no driver: it gets one")
                num_takeovers += 1
                start_driver()
            time.sleep(0.5)
            run = runs.read_run(store, run_id, known=True)
        watcher.watch(run)
    finally:
        watcher.close()
        if not terminated:
            following.leave()
    if not over:
        raise SubmitError(
            f"the driver of run {run_id} is gone and the run has not ended",
            hint=f"go on with mlpipe resume {run_id}",
        )
    found = report_of(session, store, run)  # the driver writes the same one, a moment later
    session.result({**outcome.document(store, run), "report": found}, outcome.summary(store, run, found))
    return outcome.exit_code(run, only)


def _is_over(store: Store, run: RunState, only: str | None) -> bool:
    from mlpipe.store import runs, wanted

    ended = run.state in runs.RUN_ENDED
    if only is None:
        return ended
    state = run.stages[only].state
    if state == "done":
        return True
    return (ended or state in ("failed", "cancelled", "skipped")) and not wanted.is_asked(
        store, run.run_id, only
    )
