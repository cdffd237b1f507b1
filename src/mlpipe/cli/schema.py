"""`mlpipe schema`: the JSON Schema of pipeline files."""

from __future__ import annotations

import json

import click

from mlpipe.cli.session import CliSession, shared


@click.command()
@click.option("--places", is_flag=True, help="Of the file of places that `submit --to auto` reads.")
@click.option("--networks", is_flag=True, help="Of the file of your own profiles of networks.")
@shared
@click.pass_obj
def command(session: CliSession, places: bool, networks: bool) -> None:
    """Print the JSON Schema of pipeline files, for editors and other checkers."""
    from mlpipe.spec.schema import json_schema

    if places and networks:
        raise click.UsageError("--places or --networks, not both")
    if places:
        from mlpipe.spec.places import Places

        schema = json_schema(Places)
    elif networks:
        from mlpipe.spec.network import Networks

        schema = json_schema(Networks)
    else:
        schema = json_schema()
    session.result(schema, json.dumps(schema, indent=2))
