"""`mlpipe validate SPEC...`: every mistake at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES, PlanError
from mlpipe.cli.session import CliSession, overrides, shared

if TYPE_CHECKING:
    from mlpipe.spec.model import Pipeline
    from mlpipe.spec.problems import Problem


@click.command()
@click.argument("specs", metavar="SPEC...", nargs=-1, required=True, type=click.Path())
@overrides
@click.option(
    "--print-store", is_flag=True, help="Print the store of a run of this pipeline, for scripts, and no more."
)
@shared
@click.pass_obj
def command(
    session: CliSession, specs: tuple[str, ...], overrides: tuple[str, ...], print_store: bool
) -> int:
    """Report every mistake in pipeline files, each as file:line:col. Exits 2 if there is one."""
    from mlpipe.spec.load import load_pipeline
    from mlpipe.spec.problems import SpecErrors

    if print_store:
        if len(specs) != 1:
            raise click.UsageError("--print-store takes one pipeline file")
        url = session.full_store_url(load_pipeline(specs[0], overrides=overrides).store)
        session.result({"store": url}, url)
        return 0
    files: list[dict[str, Any]] = []
    lines = []
    for spec in specs:
        try:
            pipeline = load_pipeline(spec, overrides=overrides)
        except SpecErrors as errors:
            files.append({"file": spec, "problems": [problem._asdict() for problem in errors.problems]})
            lines.append(str(errors))
        else:
            impossible = _impossible(pipeline)
            files.append({"file": spec, "problems": [problem._asdict() for problem in impossible]})
            number = len(pipeline.stages)
            ok = f"{spec}: ok, {number} stage" + ("s" if number > 1 else "")
            lines.append("\n".join(map(str, impossible)) or ok)
    valid = not any(file["problems"] for file in files)
    session.result({"valid": valid, "files": files}, "\n".join(lines))
    return 0 if valid else EXIT_CODES["input"]


def _impossible(pipeline: Pipeline) -> list[Problem]:
    """Machines of several classes among which the planner cannot split a training: all that it has to know of
    them is in the file."""
    problems = []
    for stage in pipeline.stages:
        if not stage.groups or stage.resources is None or not stage.resources.gpus_per_node:
            continue  # CPUs are those of the machine that it will run on
        from mlpipe.plan.ahead import plan_ahead
        from mlpipe.spec.problems import Problem

        try:
            plan_ahead(pipeline, stage.name, "", pipeline.name[:40])
        except PlanError as error:
            place = pipeline.place(stage.name)
            if place is not None and error.where == str(place):
                problems.append(Problem.at(place, error.message, error.hint))
    return problems
