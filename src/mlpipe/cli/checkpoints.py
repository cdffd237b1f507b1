"""`mlpipe checkpoints list|verify|prune|discard|export RUN`: the catalogue of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mlpipe._core.errors import EXIT_CODES, DamagedError, StoreError
from mlpipe._core.units import format_bytes, format_seconds
from mlpipe.cli.session import CliSession, shared

if TYPE_CHECKING:
    from mlpipe.store.base import Store
    from mlpipe.store.catalogue import Checkpoint

stage_option = click.option("--stage", metavar="NAME", help="Default: the stage that has checkpoints.")
step_option = click.option("--step", type=click.IntRange(min=0), help="Default: the latest.")
best_option = click.option("--best", is_flag=True, help="The best one, by the training's `validate.best`.")


@click.group()
def command() -> None:
    """List, verify, prune, discard or export the checkpoints of a run."""


@command.command("list")
@click.argument("run_id", metavar="RUN")
@stage_option
@shared
@click.pass_obj
def list_(session: CliSession, run_id: str, stage: str | None) -> None:
    """List the committed checkpoints of a run, the latest last."""
    import time

    store = session.store_of(run_id)
    checkpoints = _find(store, run_id, stage)
    now = time.time()
    lines = [
        f"{item.step:>9}  {format_bytes(item.size_bytes):>10}  "
        f"{format_seconds(max(now - item.time, 0)):>7} ago  {item.key}{_why_best(store, item)}"
        for item in checkpoints
    ]
    head = f"{'STEP':>9}  {'SIZE':>10}  {'SAVED':>11}  KEY"
    session.result(
        {"store": store.url, "checkpoints": [asdict(item) for item in checkpoints]},
        "\n".join([head, *lines]) if checkpoints else f"run {run_id} has no checkpoints",
    )


@command.command()
@click.argument("run_id", metavar="RUN")
@stage_option
@click.option("--step", type=click.IntRange(min=0), help="Default: all of them.")
@shared
@click.pass_obj
def verify(session: CliSession, run_id: str, stage: str | None, step: int | None) -> int:
    """Read every byte of a run's checkpoints. Exits 4 if one is not sound."""
    from mlpipe.store import catalogue

    store = session.store_of(run_id)
    documents, lines = [], []
    for item in _chosen(_find(store, run_id, stage), step, run_id):
        problems = catalogue.verify(store, item.key)
        documents.append({"key": item.key, "step": item.step, "problems": problems})
        lines += [f"{item.key}: {'ok' if not problems else 'NOT SOUND'}", *(f"  {text}" for text in problems)]
    sound = not any(document["problems"] for document in documents)
    session.result({"sound": sound, "checkpoints": documents}, "\n".join(lines))
    return 0 if sound else EXIT_CODES["infrastructure"]


@command.command()
@click.argument("run_id", metavar="RUN")
@stage_option
@click.option("--keep", type=click.IntRange(min=1), required=True, help="How many of the latest to keep.")
@shared
@click.pass_obj
def prune(session: CliSession, run_id: str, stage: str | None, keep: int) -> None:
    """Delete all but the best and the latest checkpoints of a run that nobody drives; none where one of the
    latest is damaged: discard that one first."""
    from mlpipe.store import catalogue

    store = session.store_of(run_id)
    deleted = []
    with _undriven(session, store, run_id):
        keys = sorted({item.key.partition("/checkpoints/")[0] for item in _find(store, run_id, stage)})
        for latest in (item for key in keys for item in catalogue.list_checkpoints(store, key)[-keep:]):
            try:
                catalogue.load_manifest(store, latest.key)
            except DamagedError as error:
                hint = f"mlpipe checkpoints discard {run_id} {latest.step}, then prune"
                raise DamagedError(error.message, where=error.where, hint=hint) from None
        for key in keys:
            deleted += catalogue.prune(store, key, keep)
    session.result(
        {"deleted": deleted}, "\n".join(f"deleted {key}" for key in deleted) or "nothing to delete"
    )


@command.command()
@click.argument("run_id", metavar="RUN")
@click.argument("step", type=click.IntRange(min=0))
@stage_option
@shared
@click.pass_obj
def discard(session: CliSession, run_id: str, step: int, stage: str | None) -> None:
    """Delete the checkpoint of one step of a run that nobody drives.

    The next resume goes on from the one before it, or from the start. A training that was done with this
    checkpoint is done again from there.
    """
    from mlpipe.store import catalogue

    store = session.store_of(run_id)
    with _undriven(session, store, run_id):
        chosen = _chosen(_find(store, run_id, stage), step, run_id)
        if len({item.key.partition("/checkpoints/")[0] for item in chosen}) > 1:
            raise click.UsageError(f"several stages have a checkpoint of step {step}: name one with --stage")
        for item in chosen:
            catalogue.discard(store, item.key)
    session.result({"deleted": [item.key for item in chosen]}, "\n".join(f"deleted {c.key}" for c in chosen))
    left = catalogue.latest(store, chosen[0].key.partition("/checkpoints/")[0])
    session.note(f"the latest is now that of step {left.step}" if left else "there is no other checkpoint")


@command.command()
@click.argument("run_id", metavar="RUN")
@stage_option
@step_option
@best_option
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder to write into."
)
@click.option("--ema", is_flag=True, help="The average of the weights instead of the last ones.")
@click.option("--merged", is_flag=True, help="Adapters added to the weights that they stand beside.")
@shared
@click.pass_obj
def export(
    session: CliSession,
    run_id: str,
    stage: str | None,
    step: int | None,
    best: bool,
    out: Path,
    ema: bool,
    merged: bool,
) -> None:
    """Write model.safetensors and tokenizer.json.

    Of mlpipe's Llamas also config.json: transformers loads the folder. Of a training with adapters these
    alone, in peft's format, or `--merged` the whole model.
    """
    store = session.store_of(run_id)
    checkpoints = _find(store, run_id, stage)
    if best and step is not None:
        raise click.UsageError("--step and --best name a checkpoint each: write one of them")
    if best:
        checkpoints = [item for item in checkpoints if item.best]
        if not checkpoints:
            raise StoreError(
                f"run {run_id} has no best checkpoint",
                hint="its training says which one that is: 'validate: {every: ..., best: {metric: loss}}'",
                kind="input",
            )
    item = _chosen(checkpoints, step, run_id)[-1]
    try:
        from mlpipe.train.export import export_checkpoint, export_merged
    except ImportError as error:
        raise StoreError(
            f"exporting needs {error.name}, which is not installed here",
            hint="pip install 'mlpipe[train]'",
        ) from None
    if merged:
        made = export_merged(store, item.key, out, ema=ema)
    else:
        made = export_checkpoint(store, item.key, out, tokenizer=_tokenizer(store, run_id, item), ema=ema)
    note = "" if made.transformers else "; the model's own load_state_dict takes them"
    if "adapter_config.json" in made.files:
        note = "; peft puts them beside the weights that the training started from"
    session.result(
        {**asdict(made), "folder": str(made.folder)},
        f"step {made.step}, {made.num_params} parameters, in {made.folder}: {', '.join(made.files)}{note}",
    )


def _why_best(store: Store, item: Checkpoint) -> str:
    """In words, behind its line; empty of any other."""
    from mlpipe.store import catalogue

    if not item.best:
        return ""
    judge = catalogue.read_best(store, item.key).get("judge")
    metric, value = (judge.get("metric"), judge.get("value")) if isinstance(judge, dict) else (None, None)
    return f"  best: {metric} {value:.4g}" if isinstance(value, float | int) else "  best"


def _tokenizer(store: Store, run_id: str, item: Checkpoint) -> Path | None:
    """The tokenizer.json of the text that the checkpoint was trained on."""
    from mlpipe.plan.build import stage_hardware
    from mlpipe.store import runs
    from mlpipe.submit.planning import load_stored, planner

    run = runs.read_run(store, run_id)
    stage = item.key.partition("/checkpoints/")[0].rpartition("/")[2]
    pipeline = load_stored(store, run_id, run.meta.get("set", []))
    plan = planner(store, run_id, pipeline, stage_hardware, fetch=True)(stage, item.attempt)
    data = plan.work.training.data
    folder = data.tokens or (data.files.tokenizer if data.files is not None else None)
    if folder is None:
        return None
    path = Path(folder) if folder.endswith(".json") else Path(folder) / "tokenizer.json"
    return path if path.exists() else None


def _find(store: Store, run_id: str, stage: str | None) -> list[Checkpoint]:
    """Of one stage, or of all stages of the run in its order."""
    from mlpipe.store import catalogue, runs

    run = runs.read_run(store, run_id)
    if stage is not None and stage not in run.stages:
        raise click.UsageError(f"run {run_id} has no stage {stage!r}; it has {', '.join(run.stages)}")
    return [
        item
        for name in run.stages
        if stage in (None, name)
        for item in catalogue.list_checkpoints(store, f"runs/{run_id}/stages/{name}")
    ]


@contextmanager
def _undriven(session: CliSession, store: Store, run_id: str) -> Iterator[None]:
    """Nobody drives the run, nor begins to before the end of the block: a resume would go on from what is
    being deleted."""
    from mlpipe.store import leases, runs
    from mlpipe.submit.held_lease import HeldLease

    run = runs.read_run(store, run_id)
    if leases.is_driven(store, run):
        raise StoreError(
            f"run {run_id} is being driven",
            hint="it prunes by itself (checkpoint.keep); cancel it first, or wait",
            kind="input",
        )
    try:
        with HeldLease(store, run_id, deletes=True, note=session.note):
            yield
    finally:  # by it a driver finds what the one before left behind
        runs.update_run(store, run_id, lambda now: replace(now, driver=now.driver or run.driver))


def _chosen(checkpoints: list[Checkpoint], step: int | None, run_id: str) -> list[Checkpoint]:
    chosen = [item for item in checkpoints if step in (None, item.step)]
    if not chosen:
        which = "no checkpoints" if step is None else f"no checkpoint of step {step}"
        raise StoreError(f"run {run_id} has {which}", hint=f"mlpipe checkpoints list {run_id}", kind="input")
    return chosen
