"""`mlpipe render SPEC`: the manifests of a pipeline, or its Jenkinsfile, to review and commit. Needs no
cluster, no Jenkins and no store."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mlpipe._core.errors import EXIT_CODES
from mlpipe._core.ids import is_name
from mlpipe.cli.backend_options import BackendChoice
from mlpipe.cli.session import CliSession, overrides, shared
from mlpipe.submit import backends
from mlpipe.submit.submission import Submission


@click.command()
@click.argument("spec", type=click.Path())
@click.option(
    "--for",
    "target",
    type=BackendChoice(offers=lambda backend: backend.renders),
    required=True,
    help="The backend.",
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
    session: CliSession,
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
    from mlpipe.spec.load import read_pipeline

    if check and out is None:
        raise click.UsageError("--check compares with what was written: add --out DIR or FILE")
    if run_id is not None and not is_name(run_id):
        raise click.UsageError(f"{run_id!r} is no run id: write 1 to 63 of a-z, 0-9, '.', '_', '-'")
    text, pipeline = read_pipeline(spec, overrides=overrides)
    submission = Submission(
        spec=spec,
        text=text,
        overrides=overrides,
        pipeline=pipeline,
        store_url=session.store_url or pipeline.store,
        folder=os.getcwd(),
        stage=stage,
        run_id=run_id,
    )
    rendered = backends.load(target)({}).render(submission, session)
    if out is None:
        session.result(rendered.preview.document, rendered.preview.text, as_it_is=True)
        return 0
    files = {out / name if name else out: text for name, text in rendered.files.items()}
    stale = [path for path in _ours(out, rendered.head) if path not in files] if stage is None else []
    if check:
        return _check(session, out, files, stale)
    _write(files, stale)
    written = [str(path) for path in files]
    document = {**rendered.about, "files": written}
    if rendered.head:
        document["removed"] = [str(path) for path in stale]
    session.result(document, "\n".join(written))
    return 0


def _ours(out: Path, head: str) -> list[Path]:
    """Files of `out` that an earlier render wrote, which begin with `head`."""
    return [
        path
        for path in sorted(out.glob("[0-9][0-9]*-*.yaml"))
        if head and path.is_file() and path.read_bytes().startswith(head.encode())
    ]


def _write(files: dict[Path, str], stale: list[Path]) -> None:
    path = Path()
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for path in stale:
            path.unlink()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _check(session: CliSession, out: Path, files: dict[Path, str], stale: list[Path]) -> int:
    import difflib

    diff: list[str] = []
    for path, text in files.items():
        old = path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else ""
        # not by splitlines(), to which \r, \x0b and others are ends of lines as well
        lines = difflib.unified_diff(
            old.split("\n"), text.split("\n"), str(path), "what the pipeline says", lineterm=""
        )
        diff += lines
    for path in stale:
        lines = difflib.unified_diff(
            path.read_text(errors="replace").splitlines(), [], str(path), "nothing", lineterm=""
        )
        diff += lines
    session.result({"same": not diff, "diff": diff}, "\n".join(diff) or f"{out}: {_count(files)}, the same")
    if diff:
        session.note(f"{out} is not what the pipeline says; without --check it is written anew")
    return EXIT_CODES["input"] if diff else 0


def _count(files: dict[Path, str]) -> str:
    return "1 file" if len(files) == 1 else f"{len(files)} files"
