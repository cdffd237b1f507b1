"""`mlpipe cancel RUN`: stops a run, whoever drives it, and says where it saved."""

from __future__ import annotations

import click

from mlpipe._core.units import parse_seconds
from mlpipe.cli import outcome
from mlpipe.cli.session import CliSession, ignore_not_found, shared


def _seconds(_: click.Context, __: click.Parameter, value: str) -> float:
    try:
        return parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option(
    "--timeout", default="11 min", show_default=True, callback=_seconds, help="Longest time to wait for it."
)
@ignore_not_found
@shared
@click.pass_obj
def command(session: CliSession, run_id: str, timeout: float, ignore_not_found: bool) -> None:
    """Stop a run; what it learnt is saved first.

    Returns when the run has stopped, 4 if it has not within --timeout. A training that has done no step since
    it began has nothing to save, and ends at once. Else the step under way and a save have 10 minutes, of
    large models more, an hour at most; what has not ended by then is killed. A run whose driver died is
    marked as cancelled, after what the driver left running was ended. Of a run that is a Jenkins build, the
    build is aborted first. A run that was claimed and never begun (its client died) is cleared away.
    """
    from mlpipe.api.stopping import stop_run
    from mlpipe.store.runs import RunState

    store = session.store_if_claimed(run_id, ignore_not_found=ignore_not_found)
    if store is None:
        return
    run = stop_run(store, run_id, session, timeout_seconds=timeout)
    if run is None:
        text = f"{run_id}  was claimed and never begun; its id is free again"
        session.result({"run_id": run_id, "store": store.url, "state": "cleared"}, text)
        return
    if not isinstance(run, RunState):
        session.result(run.status(), f"{run_id}  cancelled before its build made a run")
        return
    if run.is_sweep:
        from mlpipe.cli.sweep import say

        say(session, store, run)
        return
    lines = [f"{run_id}  {outcome.colour(run.state)}"]
    for name in run.stages:
        if (checkpoint := outcome.last_checkpoint(store, run, name)) is not None:
            lines.append(f"  {name} is saved at step {checkpoint.step}: {checkpoint.key}")
    if run.state != "done":
        lines.append(f"  go on with: mlpipe resume {run_id}{outcome.store_option(store)}")
    session.result(outcome.document(store, run), "\n".join(lines))
