"""`mlpipe render SPEC`: the manifests of a pipeline, or its Jenkinsfile, to review and commit. Needs no
cluster, no Jenkins and no store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlpipe._core.errors import EXIT_CODES, RenderError
from mlpipe.cli.session import Session, overrides, shared

if TYPE_CHECKING:
    from mlpipe.spec.model import Pipeline

_HEAD = (
    "# Written by `mlpipe render`, for review: change the pipeline file, not this one.\n"
    "# `mlpipe submit` creates the driver, and the driver each stage when what it needs is done.\n"
)


@click.command()
@click.argument("spec", type=click.Path())
@click.option(
    "--for", "target", type=click.Choice(["kubernetes", "jenkins"]), required=True, help="The backend."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="PATH",
    help="The folder to write NN-<stage>.yaml into; the Jenkinsfile to write.",
)
@click.option("--check", is_flag=True, help="Compare PATH instead; exit 2 with a diff if it is not the same.")
@click.option("--stage", metavar="NAME", help="Only this stage; of manifests.")
@click.option("--run-id", metavar="ID", help="Of manifests. Default: the pipeline's name and its digest.")
@overrides
@shared
@click.pass_obj
def command(
    session: Session,
    spec: str,
    target: str,
    out: Path | None,
    check: bool,
    stage: str | None,
    run_id: str | None,
    overrides: tuple[str, ...],
) -> int:
    """Write the manifests of a pipeline: those of its driver, then those that the driver will send for each
    stage. The same input gives the same bytes. What other stages make is not known yet, so it stands there
    as `{{stages.NAME.output}}`. For Jenkins: a Jenkinsfile with one stage for each of the pipeline's; run it
    at the top of the repository."""
    from mlpipe._core.ids import is_name, spec_seal
    from mlpipe.spec.load import load_pipeline

    if check and out is None:
        raise click.UsageError("--check compares with what was written: add --out DIR or FILE")
    if target == "jenkins" and (stage is not None or run_id is not None):
        raise click.UsageError(
            "--stage and --run-id are of --for kubernetes: a build has all stages and its own run"
        )
    if run_id is not None and not is_name(run_id):
        raise click.UsageError(f"{run_id!r} is no run id: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
    pipeline = load_pipeline(spec, overrides=overrides)
    if target == "jenkins":
        return _jenkins(session, pipeline, spec, overrides, out, check)
    run_id = run_id or f"{pipeline.name[:40]}-{pipeline.digest[:8]}"
    digests = spec_seal(Path(spec).read_text(encoding="utf-8-sig"), overrides)
    objects, findings = render(pipeline, session.full_store_url(pipeline.store), run_id, stage, digests)
    tell(session, findings, spec)

    from mlpipe._core.yaml import documents

    if out is None:
        every = [one for found in objects.values() for one in found]
        session.result(
            {"run_id": run_id, "findings": findings, "objects": every},
            (_of_driver(pipeline) + documents(every)).rstrip("\n"),
        )
        return 0
    files = {name: _HEAD + documents(found) for name, found in objects.items()}
    first = next(iter(files))
    files[first] = _HEAD + _of_driver(pipeline) + files[first].removeprefix(_HEAD)
    stale = [path for path in _ours(out) if path.name not in files] if stage is None else []
    if check:
        return _check(session, out, {out / name: text for name, text in files.items()}, stale)
    _write({out / name: text for name, text in files.items()}, stale)
    written = [str(out / name) for name in files]
    session.result(
        {"run_id": run_id, "findings": findings, "files": written, "removed": [str(path) for path in stale]},
        "\n".join(written),
    )
    return 0


def _jenkins(
    session: Session,
    pipeline: Pipeline,
    spec: str,
    overrides: tuple[str, ...],
    out: Path | None,
    check: bool,
) -> int:
    from mlpipe.render.jenkins import jenkinsfile

    store = session.store_url or pipeline.store
    text = jenkinsfile(pipeline, spec, overrides, store)
    if not store.startswith("s3://"):
        session.note(
            f"warning: the store {store} is a folder of the agent, and is gone with an agent that is a pod"
        )
    if out is None:
        session.result({"jenkinsfile": text}, text.rstrip("\n"))
    elif check:
        return _check(session, out, {out: text}, [])
    else:
        _write({out: text}, [])
        session.result({"files": [str(out)]}, str(out))
    return 0


def render(
    pipeline: Pipeline, store_url: str, run_id: str, stage: str | None, seal: str
) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """File name -> objects, and the findings of the lint. `seal`: `Seal.digests`, for the driver. Raises
    PlanError and RenderError."""
    from mlpipe._core.errors import PlanError
    from mlpipe.plan.ahead import plan_ahead
    from mlpipe.render.kubernetes import driver_objects, stage_objects
    from mlpipe.render.lint import lint, lint_patches

    names = [found.name for found in pipeline.stages]
    if stage is not None and stage not in names:
        raise PlanError(f"the pipeline has no stage {stage!r}", hint=f"it has {', '.join(names)}")
    plans = [plan_ahead(pipeline, name, store_url, run_id, cluster=True) for name in names]
    staged = [stage_objects(plan) for plan in plans]
    if plans[0].cluster is None:
        raise RenderError("the pipeline says nothing of a cluster")
    driver = driver_objects(
        run_id, store_url, plans[0].cluster, stage=stage, spec_digest=pipeline.digest, seal=seal
    )
    findings = [line for plan in plans if stage in (None, plan.stage) for line in lint(plan)]
    findings = list(dict.fromkeys([*findings, *lint_patches(plans, [*staged, driver])]))
    width = max(2, len(str(len(plans))))
    files = {f"{0:0{width}}-driver.yaml": driver}
    for number, (plan, found) in enumerate(zip(plans, staged, strict=True), start=1):
        if found and stage in (None, plan.stage):
            files[f"{number:0{width}}-{plan.stage}.yaml"] = found
    return files, findings


def _of_driver(pipeline: Pipeline) -> str:
    """A comment for whoever looks for the objects of a stage that has none."""
    names = [stage.name for stage in pipeline.stages if stage.kind.runs == "driver"]
    return "".join(
        f"# Stage {name} is done in the driver's own process, so it has no objects.\n" for name in names
    )


def tell(session: Session, findings: Sequence[str], spec: str) -> None:
    """Raises RenderError if one of them is an error."""
    wrong = [finding.removeprefix("error: ") for finding in findings if finding.startswith("error: ")]
    for finding in findings:
        if not finding.startswith("error: "):
            session.note(finding)
    if wrong:
        raise RenderError("; ".join(wrong), where=spec)


def _ours(out: Path) -> list[Path]:
    """Files of `out` that an earlier render wrote."""
    return [
        path
        for path in sorted(out.glob("[0-9][0-9]*-*.yaml"))
        if path.is_file() and path.read_bytes().startswith(_HEAD.encode())
    ]


def _write(files: dict[Path, str], stale: list[Path]) -> None:
    path = Path()
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="ascii")
        for path in stale:
            path.unlink()
    except OSError as error:
        raise RenderError(f"cannot be written: {error.strerror}", where=str(path)) from None


def _check(session: Session, out: Path, files: dict[Path, str], stale: list[Path]) -> int:
    import difflib

    found: list[str] = []
    for path, text in files.items():
        old = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        lines = difflib.unified_diff(
            old.splitlines(), text.splitlines(), str(path), "what the pipeline says", lineterm=""
        )
        found += lines
    for path in stale:
        lines = difflib.unified_diff(path.read_text().splitlines(), [], str(path), "nothing", lineterm="")
        found += lines
    session.result(
        {"same": not found, "diff": found}, "\n".join(found) or f"{out}: {_count(files)}, the same"
    )
    if found:
        session.note(f"{out} is not what the pipeline says; without --check it is written anew")
    return EXIT_CODES["input"] if found else 0


def _count(files: dict[Path, str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
