"""`mlpipe plan SPEC`: what will run and why, before anything runs. Needs no torch, store or network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from mlpipe._core.errors import PlanError
from mlpipe.cli.session import CliSession, overrides, shared

if TYPE_CHECKING:
    from mlpipe.plan.ahead import StagePlan
    from mlpipe.plan.choose import Candidate
    from mlpipe.plan.hardware import Hardware
    from mlpipe.plan.plan import Plan
    from mlpipe.plan.shapes.traced import Traced
    from mlpipe.plan.work import TrainPlan
    from mlpipe.spec.model import Pipeline


def _usd(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not an amount above 0, like 500")
    return value


@click.command()
@click.argument("spec", type=click.Path())
@click.option("--stage", metavar="NAME", help="Only this stage.")
@click.option("--for", "target", metavar="BACKEND", help="Where it runs: kubernetes, slurm. Default: here.")
@click.option("--explain", is_flag=True, help="Walk through the decision, with advice.")
@click.option("--nodes", metavar="A..B", help="How time and cost scale from A to B nodes.")
@click.option("--groups", metavar="LIST", help="On nodes that differ, like 2xH100-80GB,4xA100-40GB.")
@click.option(
    "--budget-usd", type=float, callback=_usd, metavar="USD", help="The fastest that costs no more."
)
@click.option("--deadline", metavar="TIME", help="The cheapest that is done in, like, '36 h'.")
@click.option("--hardware", metavar="FILE", help="What `mlpipe calibrate` measured.")
@click.option("--trace", is_flag=True, help="Size a model of your own by tracing it; needs torch.")
@overrides
@shared
@click.pass_obj
def command(
    session: CliSession,
    spec: str,
    stage: str | None,
    target: str | None,
    explain: bool,
    nodes: str | None,
    groups: str | None,
    budget_usd: float | None,
    deadline: str | None,
    hardware: str | None,
    trace: bool,
    overrides: tuple[str, ...],
) -> None:
    """Show what will run and why: strategies compared, memory and time by cause, cost."""
    from mlpipe._core.serial import to_plain
    from mlpipe.plan.ahead import named, plan_stage
    from mlpipe.plan.build import stage_hardware
    from mlpipe.plan.training import trainings
    from mlpipe.spec.load import read_pipeline

    if hardware is not None:
        overrides = (*overrides, *_name_hardware(spec, stage, hardware))
    text, pipeline = read_pipeline(spec, overrides=overrides)
    url = session.full_store_url(pipeline.store)
    hardware_of = stage_hardware if target is None else _hardware_there(target)
    _measure(session, pipeline, target)
    starts = _starts(pipeline, url, (spec, text), overrides, target)
    tracer: Callable[[Plan], Traced | None] | None = None
    if trace:
        from mlpipe.cli import plan_trace

        tracer = plan_trace.traced
    asked = _Asked(explain, nodes, groups, budget_usd, deadline)
    documents, texts, network = [], [], None
    if pipeline.network is not None:
        from mlpipe.spec.network import origin  # of few files

        network = origin(pipeline.network)
    names = named(pipeline, stage, where=spec)
    if asked.is_of_one_class and trainings(pipeline).keys().isdisjoint(names):
        raise click.UsageError("--nodes, --groups, --budget-usd and --deadline are of trainings: name one")
    for name in names:
        planned = plan_stage(pipeline, name, url, tracer, hardware_of)
        plan, shape, candidates, where = planned.plan, planned.traced, planned.candidates, planned.hardware
        document: dict[str, Any] = {}
        if session.json:
            document = {
                "stage": name,
                "kind": plan.kind.name,
                "hardware": _figures(where),
                "strategies": to_plain(candidates),
                "plan": plan.to_plain(),
            }
        if where.groups and asked.is_of_one_class:
            raise PlanError(
                "--nodes, --groups, --budget-usd and --deadline are of machines of one class",
                where=f"stage {name!r}",
                hint="leave them away, or compare with one class: --set STAGE.resources={...}",
            )
        lines = _lines(pipeline, plan, candidates, where)
        if where.groups and explain:
            from mlpipe.plan.training import explain_groups

            document["explanation"] = told = explain_groups(pipeline, name, where, shape)
            lines += ["", *(f"  {line}" for line in told), ""]
        if network is not None:
            document["network"] = network
            lines.append(f"  network: {network}")
        if name in starts:
            lines.append(f"  starts from {starts[name]}")
        if shape is not None:
            document["model"] = shape.words
            lines.append(f"  figures of {plan.work.training.model.build.entry}: {shape.words}")
            lines += _stages(pipeline, planned, document)
        if candidates and (explain or asked.is_of_one_class):
            lines += _more(pipeline, planned, asked, document)
        documents.append(document)
        texts.append("\n".join([f"{click.style(name, bold=True)} ({plan.kind})", *lines]))
    session.result({"pipeline": pipeline.name, "stages": documents}, "\n\n".join(texts))


def _figures(hardware: Hardware) -> dict[str, Any]:
    speed = hardware.speed
    kernels = {name: asdict(rates) for name, rates in speed.kernels.items()}
    groups = [_figures(group) for group in hardware.groups]
    return hardware._asdict() | {"speed": speed._asdict() | {"kernels": kernels}, "groups": groups}


def _hardware_there(target: str) -> Callable[[Pipeline, str], Hardware]:
    """What stages run on at the backend of this name."""
    from mlpipe.submit import backends
    from mlpipe.submit.delegate import Delegate

    backend = backends.load(target)
    if issubclass(backend, Delegate):
        raise click.UsageError(f"{target} only begins runs; name the backend that it submits to")
    if backend.trains_elsewhere:
        raise click.UsageError(
            f"on which machines of {target} a training will be says mlpipe submit --to {target} --dry-run"
        )
    return backend({}).hardware


def _is_here(pipeline: Pipeline, target: str | None) -> bool:
    """Whether stages will be on this machine, as far as `--for` or else the file says."""
    from mlpipe.submit import backends

    return (backends.takers(pipeline) if target is None else [target]) == [backends.DEFAULT]


def _measure(session: CliSession, pipeline: Pipeline, target: str | None) -> None:
    """This machine, if the plan is of it and nobody has."""
    from mlpipe.plan.ahead import predicted_here
    from mlpipe.plan.hardware import knows_machine

    if not knows_machine() or not predicted_here(pipeline):
        return
    from mlpipe.plan import machine

    if machine.is_known():
        return
    if _is_here(pipeline, target):
        from mlpipe.submit.measuring import measure_first  # which imports as much as a run does

        measure_first(pipeline, session.note)


def _starts(
    pipeline: Pipeline, url: str, spec: tuple[str, str], overrides: tuple[str, ...], target: str | None
) -> dict[str, str]:
    """Of each stage that starts from weights, which; those on this machine are looked at. `spec`: path and
    text. Raises SubmitError for what is not there."""
    from mlpipe.plan.training import starts_from_weights, trainings

    starting = {name: part for name, part in trainings(pipeline).items() if starts_from_weights(part)}
    if not starting:
        return {}
    from mlpipe.submit.starting import asked_for, look_ahead
    from mlpipe.submit.submission import Submission

    submission = Submission(*spec, overrides, pipeline, url, ".")
    asked = {name: asked_for(submission, name, part) for name, part in starting.items()}
    here = _is_here(pipeline, target)  # else a path may be one of there
    weights = look_ahead(submission, lambda place: here and not place.startswith("s3://"))
    return {
        name: weights[name]["found"]["words"]
        if name in weights
        else ", ".join(f"{key} {value}" for key, value in init.asked.items())
        for name, init in asked.items()
        if init is not None
    }


class _Asked(NamedTuple):
    """By the options of the same names."""

    explain: bool
    nodes: str | None
    groups: str | None
    budget_usd: float | None
    deadline: str | None

    @property
    def is_of_one_class(self) -> bool:
        """Whether any is given that has no meaning on machines that differ."""
        return bool(self.nodes or self.groups or self.budget_usd is not None or self.deadline)


def _more(pipeline: Pipeline, planned: StagePlan, asked: _Asked, document: dict[str, Any]) -> list[str]:
    """Lines for the options, and their keys in `document`."""
    from mlpipe._core.units import parse_seconds
    from mlpipe.cli.plan_table import chosen_of

    plan, candidates, hardware = planned.plan, planned.candidates, planned.hardware
    lines: list[str] = []
    chosen = chosen_of(candidates, plan.work.training)
    if asked.explain and chosen is not None:
        from mlpipe.plan.explain import explanation

        told = explanation(pipeline, plan, chosen, candidates, hardware)
        document["explanation"] = told
        lines += ["", *(f"  {line}" for line in told)]
    if asked.nodes or asked.budget_usd is not None or asked.deadline:
        from mlpipe._core.serial import to_plain
        from mlpipe.cli.plan_table import scaling
        from mlpipe.plan.scaling import scale_stage, within

        rows = scale_stage(pipeline, plan.stage, hardware, asked.nodes or "1..64", planned.traced)
        document["nodes"] = to_plain(rows)
        lines += ["", *scaling(rows)]
        if plan.launch.replicas is not None:
            alone = plan.work.training.islands is None
            what = "gradients after the backward pass" if alone else "what it learnt when a round ends"
            lines.append(
                f"  each row is of nodes that stay, with a replica on each, which sends {what}, at the "
                "network's full speed"
            )
        if asked.budget_usd is not None or asked.deadline:
            try:
                limit = parse_seconds(asked.deadline) if asked.deadline else None
            except ValueError as error:
                raise click.BadParameter(str(error), param_hint="--deadline") from None
            row, why = within(rows, asked.budget_usd, limit)
            document["within"] = {"nodes": row.num_nodes, "reason": why}
            lines += [f"  {why}"]
    if asked.groups:
        from mlpipe._core.serial import to_plain
        from mlpipe.cli.plan_table import groups, mixed_words
        from mlpipe.plan.asked_groups import plan_groups

        mixed = plan_groups(pipeline, plan.stage, hardware, asked.groups, planned.traced)
        document["groups"] = to_plain(mixed)
        lines += ["", *groups(mixed.groups), *mixed_words(mixed)]
    return lines


def _stages(pipeline: Pipeline, planned: StagePlan, document: dict[str, Any]) -> list[str]:
    """Of a traced model that is cut into stages, what each rank has of it."""
    from mlpipe.cli.plan_table import chosen_of
    from mlpipe.plan.cut_stages import cut_of, words_of
    from mlpipe.plan.training import trainings

    spec, chosen = (
        trainings(pipeline)[planned.stage],
        chosen_of(planned.candidates, planned.plan.work.training),
    )
    if planned.traced is None or chosen is None:
        return []
    cut = cut_of(spec, planned.traced, planned.hardware, chosen)
    if cut is None:
        return []
    document["cut"] = asdict(cut)
    return words_of(cut)


def _name_hardware(spec: str, stage: str | None, path: str) -> tuple[str, ...]:
    """`--hardware FILE` says of each training stage what `resources.hardware` would."""
    from mlpipe.plan.training import trainings
    from mlpipe.spec.load import load_pipeline

    names = [name for name in trainings(load_pipeline(spec)) if stage in (None, name)]
    return tuple(f"stages.{name}.resources.hardware={path}" for name in names)


def _lines(pipeline: Pipeline, plan: Plan, candidates: list[Candidate], hardware: Hardware) -> list[str]:
    from mlpipe.cli.plan_table import causes, chosen_of, table
    from mlpipe.plan.candidates import precision_on
    from mlpipe.plan.training import trainings

    training = trainings(pipeline).get(plan.stage)
    if training is None:
        return [f"  {plan.work.summary}"]
    chosen, choice = chosen_of(candidates, plan.work.training), _choice(plan, plan.work.training)
    choice.append("  {}: {}".format(*precision_on(training, hardware)))
    if plan.work.training.groups:
        from mlpipe.cli.plan_table import groups

        return [*choice, *groups(plan.work.training.groups)]
    if chosen is None:
        return choice
    source = hardware.speed.calibrated or "catalogue; not calibrated"
    return [
        *table(candidates, chosen),
        *choice,
        *causes(chosen),
        f"  figures of {hardware.name}: {source}",
    ]


def _choice(plan: Plan, train: TrainPlan) -> list[str]:
    axes = (f"{axis} {size}" for axis, size in train.mesh.larger_axes.items())
    mesh = ", ".join(axes) or "one worker"
    saves = (
        f"every {train.checkpoint.every_steps} steps"
        if train.checkpoint.every_steps is not None
        else f"every {train.checkpoint.every_seconds:.0f} s"
    )
    launch = plan.launch
    mesh += "; keys and values in a ring" if train.context_exchange == "ring" else ""
    waiting = "" if train.communication == "collective" else f"; communication: {train.communication}"
    replicas = launch.replicas
    each = (
        [
            f"  elastic, {replicas.fewest} to {replicas.most} nodes: all here is of one node that has the "
            "whole batch, its time and cost too"
        ]
        if replicas is not None
        else []
    )
    return [
        *each,
        f"  {train.reason}",
        f"  {launch.num_nodes} x {launch.nproc_per_node} workers on {launch.device}; mesh: {mesh}{waiting}",
        _batch(train),
        f"  {train.steps} steps, {train.precision}; checkpoint {saves}",
        *_idle(train),
    ]


def _batch(train: TrainPlan) -> str:
    if train.groups:
        from mlpipe._core.units import format_step_seconds

        seconds = train.predicted.step_seconds if train.predicted is not None else None
        step = "" if seconds is None else f"; a step of {format_step_seconds(seconds)}"
        return f"  batch {train.global_batch}, dealt by speed{step}"
    return (
        f"  batch {train.global_batch} = micro-batch {train.micro_batch} x {train.mesh.num_data_ranks} data "
        f"ranks x {train.accumulation} gradient accumulation steps"
    )


def _idle(train: TrainPlan) -> list[str]:
    if train.predicted is None or not train.predicted.idle_ratios:
        return []
    each = ", ".join(f"{way} {100 * ratio:.1f} %" for way, ratio in train.predicted.idle_ratios.items())
    return [f"  workers wait, since samples differ in length: {each} of their time"]
