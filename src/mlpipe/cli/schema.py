"""`mlpipe schema`: the JSON Schema of pipeline files."""

from __future__ import annotations

import json

import click

from mlpipe.cli.session import CliSession, shared


@click.command()
@shared
@click.pass_obj
def command(session: CliSession) -> None:
    """Print the JSON Schema of pipeline files, for editors and other checkers."""
    from mlpipe.spec.schema import json_schema

    schema = json_schema()
    session.result(schema, json.dumps(schema, indent=2))
