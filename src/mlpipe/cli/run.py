"""`mlpipe run SPEC`: all stages here, in the foreground."""

from __future__ import annotations

import click

from mlpipe._core.errors import EXIT_CODES
from mlpipe.cli.session import CliSession, overrides, shared
from mlpipe.submit import backends


@click.command()
@click.argument("spec", type=click.Path())
@overrides
@click.option("--run-id", metavar="ID", help="Name of the run. Default: pipeline, time and chance.")
@click.option("--ranks", type=click.IntRange(min=1), metavar="N", help="Smoke test: on N workers here.")
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Smoke test: N steps of each training."
)
@click.option("--tiny", is_flag=True, help="Smoke test: the smallest shapes and data, and no gate.")
@click.option(
    "--debug-rank",
    type=click.IntRange(min=0),
    metavar="RANK",
    help="Give this worker the terminal: breakpoint() stops there, nothing hangs too early.",
)
@shared
@click.pass_obj
def command(
    session: CliSession,
    spec: str,
    overrides: tuple[str, ...],
    run_id: str | None,
    ranks: int | None,
    steps: int | None,
    tiny: bool,
    debug_rank: int | None,
) -> int:
    """Run a pipeline here, in the foreground.

    A pipeline with a `sweep` is run as `mlpipe sweep` does. Ctrl-C saves and stops, a second one stops at
    once; `mlpipe resume` goes on. Exits 0 when the run is done, 3 when it failed by its own code or its gate,
    4 for infrastructure, 5 when it was cancelled (also by SIGTERM), 130 after Ctrl-C.

    A smoke test (--ranks, --steps, --tiny, each by itself or together) runs all stages by the same code and
    registers no model. What it changes are overrides that stand above --set.
    """
    from mlpipe.api.pipeline import load
    from mlpipe.api.start import submission_of
    from mlpipe.cli.foreground import drive_here
    from mlpipe.submit.adopt import create

    pipeline = load(spec, overrides)
    if ranks is not None or steps is not None or tiny:
        pipeline = pipeline.smoke(ranks=ranks, steps=steps, tiny=tiny)
    if debug_rank is not None:
        from mlpipe.api.debugging import debugged, terminal_given_back

        pipeline = debugged(pipeline, debug_rank)
    store = session.open_store(pipeline.spec.store)
    backend = backends.load(backends.DEFAULT)({})
    submission = submission_of(pipeline, store, run_id)
    if pipeline.spec.sweep is not None:
        from mlpipe.cli import sweep

        return sweep.drive(session, store, sweep.create(session, store, backend, submission))
    run_id = create(store, backend, submission, session)
    try:
        session.note(f"run {run_id} in {store.url}")
        if debug_rank is None:
            return drive_here(session, store, run_id)
        session.quiet = True  # the terminal is the rank's
        with terminal_given_back():
            return drive_here(session, store, run_id)
    except KeyboardInterrupt:  # before it could be heard, or a second one
        session.complain(
            f"stopped; `mlpipe status {run_id}` says what is left, `mlpipe resume {run_id}` goes on"
        )
        return EXIT_CODES["interrupted"]
