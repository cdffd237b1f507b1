"""`mlpipe monitor up`: a Prometheus over the runs of this machine, until Ctrl-C."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import click

from mlpipe._core.errors import MlpipeError, StoreError
from mlpipe.cli.session import CliSession, interrupt, shared

_READY_SECONDS = 30.0
_STOP_SECONDS = 15.0


@click.group()
def command() -> None:
    """Watch the runs of this machine with a Prometheus of your own."""


@command.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("mlpipe-monitor"),
    show_default=True,
    help="Configuration, data of Prometheus and provisioning of Grafana; may be used again.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=9090, show_default=True, help="Of Prometheus.")
@click.option("--interval", type=click.FloatRange(min=1.0), default=5.0, show_default=True, help="Seconds.")
@shared
@click.pass_obj
def up(session: CliSession, folder: Path, port: int, interval: float) -> None:
    """Start the `prometheus` of your PATH, let it scrape the ranks of local runs (found in the store) and an
    exporter over the store, with mlpipe's rules; write Grafana's provisioning files beside it. Ctrl-C ends
    everything that was started."""
    from mlpipe.observe import scrape
    from mlpipe.observe.exporter import Fleet
    from mlpipe.observe.serve import Serving

    program = shutil.which("prometheus")
    if program is None:
        raise MlpipeError(
            "there is no prometheus in PATH",
            hint="install it (Debian: apt install prometheus), or use `mlpipe top`",
            kind="infrastructure",
        )
    store = session.open_store()
    fleet, targets = Fleet(store), scrape.Targets(store)
    fleet.round()
    url = f"http://127.0.0.1:{port}"
    exporter = Serving(fleet, "127.0.0.1", 0)
    try:
        scrape.write_prometheus(folder, interval_seconds=interval)
        scrape.write_targets(folder, targets.find(fleet.under_way), exporter.port)
        provisioning = scrape.write_grafana(folder, url)
    except OSError as error:
        words = f"cannot write to {folder}: {error.strerror}"
        raise click.BadParameter(words, param_hint="--folder") from None
    signal.signal(signal.SIGTERM, interrupt)
    log = folder / "prometheus.log"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [program, "--config.file=prometheus.yml", "--storage.tsdb.path=data",
             f"--web.listen-address=127.0.0.1:{port}"],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,  # Ctrl-C is ours: it ends after we have said so
        )  # fmt: skip
    try:
        _await_ready(process, url, log)
        text = f"{url}\nGrafana: GF_PATHS_PROVISIONING={provisioning.absolute()}\nCtrl-C ends it"
        session.result({"url": url, "grafana_provisioning": str(provisioning.absolute())}, text)
        sys.stdout.flush()
        while True:
            time.sleep(interval)
            _check(process, log)
            try:
                fleet.round()
                scrape.write_targets(folder, targets.find(fleet.under_way), exporter.port)
            except StoreError as error:
                session.note(f"{time.strftime('%H:%M:%S')} {error}")
    except KeyboardInterrupt:
        session.note("stopping")
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)
        exporter.close()


def _await_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        _check(process, log)
        try:
            urllib.request.urlopen(f"{url}/-/ready", timeout=2).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise MlpipeError(
                    f"prometheus was not ready within {_READY_SECONDS:.0f} s",
                    where=str(log),
                    kind="infrastructure",
                ) from None
        time.sleep(0.1)


def _check(process: subprocess.Popen[bytes], log: Path) -> None:
    if process.poll() is not None:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise MlpipeError(
            f"prometheus ended with code {process.returncode}: {' '.join(last)}",
            where=str(log),
            hint="is the port taken? choose another one with --port",
            kind="infrastructure",
        )
