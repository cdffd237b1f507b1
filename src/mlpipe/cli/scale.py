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
    elastic = {}
    for name in sorted(running if stage is None else {stage}):
        key = f"{run.attempt_key(name)}/plan.json"
        replicas_of = Plan.from_json(store.get(key)).launch.replicas if store.exists(key) else None
        if replicas_of is not None:
            elastic[name] = replicas_of
    if not elastic:
        raise SubmitError(
            "no elastic training runs",
            where=run_id,
            hint="an elastic one has a range: resources: {nodes: 2..8}",
            kind="input",
        )
    if len(elastic) > 1:
        raise SubmitError(
            f"several elastic trainings run: {', '.join(elastic)}",
            where=run_id,
            hint="add --stage",
            kind="input",
        )
    ((name, limits),) = elastic.items()
    if not limits.fewest <= nodes <= limits.most:
        raise SubmitError(
            f"{nodes} is not between the {limits.fewest} and {limits.most} nodes of stage {name!r}",
            where=run_id,
            hint=f"write one of them, or resume with --set stages.{name}.resources.nodes=A..B",
            kind="input",
        )
    replicas.want(store, run.attempt_key(name), nodes)
    session.result(
        {"run_id": run_id, "stage": name, "nodes": nodes}, f"{run_id}  {name} is told to have {nodes} nodes"
    )
