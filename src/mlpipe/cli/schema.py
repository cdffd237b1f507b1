"""`mlpipe schema`: the JSON Schema of pipeline files."""

from __future__ import annotations

import json

import click

from mlpipe.cli.session import CliSession, shared


@click.command()
@click.option("--places", is_flag=True, help="Of the file of places that `submit --to auto` reads.")
@shared
@click.pass_obj
def command(session: CliSession, places: bool) -> None:
    """Print the JSON Schema of pipeline files, for editors and other checkers."""
    from mlpipe.spec.schema import json_schema

    if places:
        from mlpipe.spec.places import Places

        schema = json_schema(Places)
    else:
        schema = json_schema()
    session.result(schema, json.dumps(schema, indent=2))
