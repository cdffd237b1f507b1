"""`mlpipe models list|show|promote`: the registry of models."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from mlpipe._core.errors import DamagedError, StoreError
from mlpipe._core.units import format_bytes
from mlpipe.cli.session import CliSession, shared


@click.group()
def command() -> None:
    """List, show or promote registered models."""


@command.command("list")
@shared
@click.pass_obj
def list_(session: CliSession) -> None:
    """List the models, their versions and aliases."""
    from mlpipe.store import registry

    store = session.open_store()
    registered, damaged = registry.list_models(store)
    width = max([5, *(len(model.name) for model in registered)])
    lines = [f"{'MODEL'.ljust(width)}  {'VERSION':>7}  {'STEP':>8}  {'SIZE':>10}  {'ALIASES':12}  RUN"]
    lines += [
        f"{model.name.ljust(width)}  {model.version:>7}  {model.step:>8}  "
        f"{format_bytes(model.size_bytes):>10}  {','.join(model.aliases):12}  {model.lineage.get('run', '')}"
        for model in registered
    ]
    if not registered:
        lines = [f"no {'sound ' if damaged else ''}models in {store.url}"]
    lines += [f"damaged: {problem.where}: {problem.message}" for problem in damaged]
    problems = [{"where": problem.where, "message": problem.message} for problem in damaged]
    models = [asdict(model) for model in registered]
    session.result({"store": store.url, "models": models, "damaged": problems}, "\n".join(lines))


@command.command()
@click.argument("name")
@click.argument("version", required=False)
@shared
@click.pass_obj
def show(session: CliSession, name: str, version: str | None) -> None:
    """Show where a model's VERSION (a number or an alias; default: the latest) came from."""
    from mlpipe.store import registry

    try:
        model = asdict(registry.show_model(session.open_store(), name, version))
    except DamagedError as error:
        error.hint = (
            error.hint or f"mlpipe models list shows which are sound: mlpipe models show {name} VERSION"
        )
        raise
    session.result(model, json.dumps(model, indent=2))


@command.command()
@click.argument("run_id", metavar="RUN")
@click.option("--as", "name", required=True, metavar="NAME", help="Name of the model.")
@click.option("--alias", metavar="ALIAS", help="Points to the new version from now on.")
@click.option("--stage", metavar="NAME", help="Training stage. Default: the one that has checkpoints.")
@shared
@click.pass_obj
def promote(session: CliSession, run_id: str, name: str, alias: str | None, stage: str | None) -> None:
    """Register the latest checkpoint of a run by hand, whatever a gate says. Exits 4 if it is not sound."""
    from mlpipe.cli.outcome import last_checkpoint
    from mlpipe.kinds.promote.driver import promote as register
    from mlpipe.kinds.promote.plan import PromotePlan
    from mlpipe.store import runs

    store = session.store_of(run_id)
    run = runs.read_run(store, run_id)
    stages = [name for name in run.stages if stage in (None, name) and last_checkpoint(store, run, name)]
    if len(stages) != 1:
        raise StoreError(
            f"{len(stages)} stages of run {run_id} have checkpoints",
            hint="name one with --stage" if stages else f"see mlpipe status {run_id}",
            kind="input",
        )
    plan = PromotePlan(train_stage=stages[0], evaluate_stage=None, model_name=name, alias=alias)
    version, checkpoint = register(store, run_id, plan)
    document: dict[str, Any] = {"model": name, "version": version, "alias": alias, "step": checkpoint.step}
    session.result(document, f"{name} version {version}: step {checkpoint.step} of run {run_id}")
