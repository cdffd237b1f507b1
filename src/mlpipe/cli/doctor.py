"""`mlpipe doctor`: what this machine, the store and a cluster lack, each with its remedy."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any, Literal

import click

from mlpipe._core import environment
from mlpipe._core.errors import EXIT_CODES
from mlpipe._core.units import format_bytes
from mlpipe.cli.backend_options import BackendChoice, WithBackendOptions
from mlpipe.cli.session import CliSession, shared
from mlpipe.submit import backends
from mlpipe.submit.submission import Finding, attempt

_POLICY = "s3-policy"
_DISK_FLOOR_BYTES = 5 * 2**30
_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command(cls=WithBackendOptions, chosen_by="target", verb="doctor")
@click.option(
    "--for",
    "target",
    type=BackendChoice(also=(_POLICY,)),
    help="Another backend, not this machine; or print the policy that keys of the store need.",
)
@click.option(
    "--of",
    "who",
    type=click.Choice(["worker", "driver"]),
    help="Of the policy; a driver's is a submitter's, too.",
)
@click.option("--run", "run_id", metavar="RUN", help="Of a worker's policy. Default: every run of the store.")
@shared
@click.pass_obj
def command(
    session: CliSession,
    target: str | None,
    who: Literal["worker", "driver"] | None,
    run_id: str | None,
    options: dict[str, Any],
) -> int:
    """Say what this machine and the store lack, or another backend with --for, each with its remedy.

    Exits 0 when a pipeline can be trained there, else 4.

    `--for s3-policy --of worker|driver` prints the IAM policy document for the keys of the store.
    """
    if (target == _POLICY) != (who is not None) or (who is None and run_id is not None):
        raise click.UsageError("--of worker|driver and --run are for --for s3-policy, which needs --of")
    if who is not None:
        return _policy(session, who, run_id)
    backend = backends.load(target or backends.DEFAULT)(options)
    findings = [*backend.doctor(store_findings(session)), *_networks()]
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        word, colour = _MARKS[finding.level]
        lines.append(
            f"{click.style(word.ljust(4), fg=colour)}  {finding.name.ljust(width)}  {finding.detail}"
        )
        if finding.remedy:
            lines.append(f"{'':{width + 8}}-> {finding.remedy}")
    failed = any(finding.level == "fail" for finding in findings)
    session.result({"usable": not failed, "findings": [f._asdict() for f in findings]}, "\n".join(lines))
    return EXIT_CODES["infrastructure"] if failed else 0


def _policy(session: CliSession, who: Literal["worker", "driver"], run_id: str | None) -> int:
    from mlpipe.store.s3_policy import policy

    document = policy(session.full_store_url(), who, run_id)
    session.result(document, json.dumps(document, indent=2))
    return 0


def _networks() -> Iterator[Finding]:
    """Profiles of the user's own, if there is a file of them."""
    from mlpipe.spec.load import read_networks
    from mlpipe.spec.network import default_path

    path = default_path()
    if os.environ.get(environment.NETWORKS) or path.exists():
        found = attempt("networks", lambda: read_networks(path))
        yield (
            found
            if isinstance(found, Finding)
            else Finding("networks", "ok", f"{path}: {', '.join(found) or 'none'}")
        )


def store_findings(session: CliSession) -> Iterator[Finding]:
    """Whether the store does what is asked of it, and has room."""
    url = session.store_url or "./runs"
    store = attempt("store", lambda: session.open_store())
    if isinstance(store, Finding):
        yield store
        return
    problem = attempt("store", store.probe)
    if isinstance(problem, Finding):
        yield problem
        return
    yield Finding("store", "ok", f"{url}: writes, reads and conditional writes work")
    folder = store.local_path("runs")
    if folder is not None:
        folder = folder.parent
        while not folder.exists():
            folder = folder.parent
        free = shutil.disk_usage(folder).free
        level: Literal["ok", "warn"] = "ok" if free > _DISK_FLOOR_BYTES else "warn"
        remedy = None if level == "ok" else "free some, or give --store on another disk"
        yield Finding("disk", level, f"{format_bytes(free)} free in {folder}", remedy)
