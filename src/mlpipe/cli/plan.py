"""`mlpipe plan SPEC`: what will run and why, before anything runs. Needs no torch, store or network."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.units import format_bytes
from mlpipe.cli.session import Session, overrides, shared

if TYPE_CHECKING:
    from mlpipe.plan.choose import Candidate
    from mlpipe.plan.plan import Plan, TrainPlan


@click.command()
@click.argument("spec", type=click.Path())
@click.option("--stage", metavar="NAME", help="Only this stage.")
@overrides
@shared
@click.pass_obj
def command(session: Session, spec: str, stage: str | None, overrides: tuple[str, ...]) -> None:
    """Show what will run and why: strategies compared, memory by cause, mesh and batch."""
    from mlpipe._core.errors import PlanError
    from mlpipe.plan.build import compare, stage_hardware
    from mlpipe.spec.load import load_pipeline
    from mlpipe.submit.planning import plan_ahead

    pipeline = load_pipeline(spec, overrides=overrides)
    url = session.full_store_url(pipeline.store)
    names = [found.name for found in pipeline.stages]
    if stage is not None and stage not in names:
        raise PlanError(f"the pipeline has no stage {stage!r}", where=spec, hint=f"it has {', '.join(names)}")
    documents, texts = [], []
    for name in names if stage is None else [stage]:
        hardware = stage_hardware(pipeline, name)
        plan = plan_ahead(pipeline, name, url, f"{pipeline.name[:40]}-RUN")
        candidates = compare(pipeline, name, hardware) if plan.train is not None else []
        documents.append(
            {
                "stage": name,
                "kind": plan.kind,
                "hardware": asdict(hardware),
                "strategies": [asdict(found) for found in candidates],
                "plan": asdict(plan),
            }
        )
        texts.append("\n".join([f"{click.style(name, bold=True)} ({plan.kind})", *_lines(plan, candidates)]))
    session.result({"pipeline": pipeline.name, "stages": documents}, "\n\n".join(texts))


def _lines(plan: Plan, candidates: list[Candidate]) -> list[str]:
    if plan.train is not None:
        return [*_table(candidates, plan.train), *_choice(plan, plan.train)]
    if plan.evaluate is not None:
        gate = f", gate {plan.evaluate.gate}" if plan.evaluate.gate else ", no gate"
        return [f"  {plan.evaluate.train_stage}'s latest checkpoint on held-out text{gate}"]
    if plan.command is not None:
        import shlex

        return [f"  {shlex.join(plan.command.argv)}"]
    promote = plan.promote
    if promote is None:
        return []
    alias = f", alias {promote.alias}" if promote.alias else ""
    return [f"  {promote.train_stage}'s checkpoint as model {promote.model_name}{alias}"]


def _table(candidates: list[Candidate], chosen: TrainPlan) -> list[str]:
    rows: list[tuple[Any, ...]] = [
        ("", "strategy", "per worker", "weights", "gradients", "optimizer", "activations", "why")
    ]
    for found in candidates:
        memory = found.memory
        cells: tuple[str, ...] = ("-",) * 5
        if memory is not None:
            parts = (memory.total, memory.parameters, memory.gradients, memory.optimizer, memory.activations)
            cells = tuple(format_bytes(part) for part in parts)
        mark = "->" if found.strategy == chosen.strategy else "" if found.fits else "x"
        rows.append((mark, found.strategy, *cells, found.reason))
    widths = [max(len(str(row[i])) for row in rows) for i in range(7)]
    return [
        "  "
        + "  ".join(str(cell).ljust(width) for cell, width in zip(row, [*widths, 0], strict=True)).rstrip()
        for row in rows
    ]


def _choice(plan: Plan, train: TrainPlan) -> list[str]:
    axes = {axis: size for axis, size in asdict(train.mesh).items() if size > 1}
    mesh = ", ".join(f"{axis} {size}" for axis, size in axes.items()) or "one worker"
    saves = (
        f"every {train.checkpoint.every_steps} steps"
        if train.checkpoint.every_steps is not None
        else f"every {train.checkpoint.every_seconds:.0f} s"
    )
    launch = plan.launch
    return [
        f"  {train.reason}",
        f"  {launch.num_nodes} x {launch.nproc_per_node} workers on {launch.device}; mesh: {mesh}",
        f"  batch {train.global_batch} = {train.micro_batch} a pass x {train.mesh.data_ranks} data ranks x "
        f"{train.accumulation} passes; {train.steps} steps, {train.precision}; checkpoint {saves}",
    ]
