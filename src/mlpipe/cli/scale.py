"""`mlpipe scale RUN --nodes N`: how many nodes an elastic training has from now on."""

from __future__ import annotations

import click

from mlpipe._core.errors import SubmitError
from mlpipe.cli.session import CliSession, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--nodes", type=click.IntRange(min=1), required=True, help="Between the fewest and the most.")
@click.option("--stage", metavar="NAME", help="Default: the elastic one that runs.")
@shared
@click.pass_obj
def command(session: CliSession, run_id: str, nodes: int, stage: str | None) -> None:
    """Change how many nodes an elastic training (`nodes: 2..8`) has, while it runs.

    A new one takes the state of the others and joins in at the next step; one that is too many leaves after a
    step. Nothing is started anew, and what a step computes stays the same.
    """
    from mlpipe.plan.plan import Plan
    from mlpipe.store import replicas, runs

    store = session.store_of(run_id)
    run = runs.read_run(store, run_id)
    running = {name for name, one in run.stages.items() if one.state == "running"}
    if stage is not None and stage not in running:
        raise SubmitError(
            f"no stage {stage!r} runs", where=run_id, hint=f"see mlpipe status {run_id}", kind="input"
        )
    for name in sorted(running if stage is None else {stage}):
        plan = Plan.from_json(store.get(f"{run.attempt_key(name)}/plan.json"))
        limits = plan.launch.replicas
        if limits is None:
            continue
        if not limits.fewest <= nodes <= limits.most:
            raise SubmitError(
                f"{nodes} is not between the {limits.fewest} and {limits.most} nodes of stage {name!r}",
                where=run_id,
                hint="write one of these, or resume with another range: --set resources.nodes=2..8",
                kind="input",
            )
        replicas.want(store, run.attempt_key(name), nodes)
        session.result(
            {"run_id": run_id, "stage": name, "nodes": nodes}, f"{run_id}  {name} goes on with {nodes} nodes"
        )
        return
    raise SubmitError(
        "no elastic training runs",
        where=run_id,
        hint="an elastic one has a range: resources: {nodes: 2..8}",
        kind="input",
    )
