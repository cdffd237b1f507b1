"""`mlpipe exporter`: the runs of a store as metrics, until it is stopped."""

from __future__ import annotations

import threading
import time

import click

from mlpipe._core.errors import StoreError
from mlpipe.cli.session import CliSession, shared


@click.command()
@click.option(
    "--address",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; in a pod 0.0.0.0, all of it, IPv6 too.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=9399, show_default=True, help="0: any free one."
)
@click.option(
    "--interval",
    type=click.FloatRange(min=1.0),
    default=15.0,
    show_default=True,
    help="Seconds between two looks at the store.",
)
@shared
@click.pass_obj
def command(session: CliSession, address: str, port: int, interval: float) -> None:
    """Serve what the store knows about all runs: their states, causes of failures, goodput and cost, and the
    last step of those under way. Reads only; Ctrl-C ends it."""
    from mlpipe.observe.exporter import Fleet
    from mlpipe.observe.serve import Serving

    store = session.open_store()
    fleet = Fleet(store)
    fleet.round()  # what is wrong with the store is told before anything is served
    try:
        serving = Serving(fleet, address, port)
    except OSError as error:
        raise click.BadParameter(f"cannot listen on {address}:{port}: {error.strerror}") from None
    url = f"http://{f'[{address}]' if ':' in address else address}:{serving.port}/metrics"
    session.result({"url": url}, url)
    over = threading.Event()
    try:
        while not over.wait(interval):
            try:
                fleet.round()
            except StoreError as error:  # it may come back; the time of the last round says how old all is
                session.note(f"{time.strftime('%H:%M:%S')} {error}")
    except KeyboardInterrupt:
        pass
    finally:
        serving.close()
