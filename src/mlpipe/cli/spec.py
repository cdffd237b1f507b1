"""`mlpipe spec RUN`: the pipeline of a run, as it was asked for."""

from __future__ import annotations

from pathlib import Path

import click

from mlpipe._core.errors import SubmitError
from mlpipe.cli.session import CliSession, shared


@click.command()
@click.argument("run_id", metavar="RUN")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.")
@click.option("--digest", metavar="SHA256", help="Refuse any other pipeline.")
@click.option("--stages", metavar="NAME,...", help="Refuse a pipeline that has other stages.")
@shared
@click.pass_obj
def command(
    session: CliSession, run_id: str, out: Path | None, digest: str | None, stages: str | None
) -> None:
    """Print the pipeline of a run, overrides and defaults written out.

    Of a run that a Jenkins build is to make as well, which is how the build gets it.
    """
    from mlpipe.spec.load import load_pipeline_text
    from mlpipe.store import runs
    from mlpipe.submit import backends
    from mlpipe.submit.planning import load_stored

    store = session.store_of(run_id)
    if (request := backends.awaited(store, run_id)) is not None:
        pipeline = load_pipeline_text(request.pipeline, request.key)
    else:
        pipeline = load_stored(store, run_id, runs.read_run(store, run_id).meta.get("set", []))
    if digest is not None and digest != pipeline.digest:
        raise SubmitError(
            f"the pipeline of run {run_id} is not the one that was asked for",
            where=store.url,
            hint=f"its digest is {pipeline.digest}",
            kind="input",
        )
    names = [stage.name for stage in pipeline.stages]
    if stages is not None and sorted(names) != sorted(stages.split(",")):
        raise SubmitError(
            f"the pipeline of run {run_id} has the stages {', '.join(names)}; the build has {stages}",
            hint="render the Jenkinsfile anew (mlpipe render --for jenkins), or submit to another job",
            kind="input",
        )
    text = pipeline.resolved_yaml()
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SubmitError(f"cannot be written: {error.strerror}", where=str(out), kind="input") from None
    document = {"run_id": run_id, "spec_digest": pipeline.digest, "pipeline": text}
    session.result(document, text.rstrip("\n") if out is None else str(out), as_it_is=out is None)
