"""`mlpipe init [DIR]`: a pipeline to start from, which runs as it is."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from mlpipe._core.errors import SpecError
from mlpipe._core.printable import as_argument
from mlpipe.cli.session import CliSession, shared

FILE_NAME = "pipeline.yaml"


@click.command()
@click.argument("folder", metavar="[DIR]", default=".", type=click.Path(file_okay=False, path_type=Path))
@shared
@click.pass_obj
def command(session: CliSession, folder: Path) -> None:
    """Write pipeline.yaml into DIR (default: here): a small model that trains in minutes on two cores.

    Never overwrites a file. A --store that is given is written into it.
    """
    target = folder / FILE_NAME
    text = files("mlpipe.cli").joinpath("starter.yaml").read_text()
    if session.store_is_given and session.store_url:
        from mlpipe._core.yaml import to_yaml
        from mlpipe.spec.load import load_pipeline_text

        text = text.replace("store: ./runs\n", to_yaml({"store": session.store_url}))
        load_pipeline_text(text, str(target))  # raises for what is no store
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with target.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise SpecError("exists already", where=str(target), hint="name another folder") from None
    except OSError as error:
        error.filename = error.filename or str(target)
        raise
    session.result(
        {"file": str(target)}, f"wrote {target}; run it with: mlpipe run {as_argument(str(target))}"
    )
