"""A real run to be scraped: two ranks under torchrun on gloo that step until they are told to stop, and a
real exporter over their store."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.command_runs import Cli, until

RUN = "paced-20261121-100000-ab12"
DATA_SECONDS = 300  # until a series or an alert is there
_START_SECONDS = 240  # of a run of seconds, on a machine that others use too


@contextlib.contextmanager
def real_run(
    folder: Path,
    run: str = RUN,
    sample_seconds: float = 0.0,
    every: int = 20,
    validates: bool = False,
    **model: Any,
) -> Iterator[list[int]]:
    """Two ranks that step until they are told to stop, ten times a second where data comes at once; the ports
    of their /metrics. `model`: further arguments of the model."""
    pytest.importorskip("torch", reason="torch is missing: make install")
    cli = Cli(folder, warm=True)
    cli.env["PYTHONPATH"] = str(Path(__file__).parents[1])
    cli.env |= {"BUILD_TAG": "jenkins-paced-17", "BUILD_URL": "https://jenkins.example.com/job/paced/17/"}
    train: dict[str, Any] = {
        "model": {"entry": "kit.paced:build_model", "args": {"seconds": 0.1, **model}, "seq_len": 32},
        "data": {"entry": "kit.paced:build_dataset", "args": {"seconds": sample_seconds}, "batch_size": 8},
        "steps": 100_000,
        "strategy": "ddp",
        "checkpoint": {"every": f"{every} steps", "keep": 2},
        "max_restarts": 0,
    }
    if validates:
        train["validate"] = {"every": f"{every} steps", "max_tokens": 8 * 32}
    resources = {"workers_per_node": 2, "price_usd_per_gpu_hour": 2.5}
    stage = {"name": "train", "train": train, "resources": resources}
    spec = {"version": 1, "name": "paced", "stages": [stage]}
    (folder / "pipeline.yaml").write_text(json.dumps(spec))
    log = (folder / "log").open("w")
    running = cli.start("run", "pipeline.yaml", "--run-id", run, stdout=log, stderr=log)

    def ports() -> list[int]:
        assert running.poll() is None, (folder / "log").read_text()
        files = sorted(cli.store.glob(f"runs/{run}/stages/train/attempt-1/records/rank-*.jsonl"))
        lines = [path.read_text().partition("\n") for path in files]
        started = [json.loads(first) for first, newline, _ in lines if newline]
        return [one["metrics_port"] for one in started] if len(started) == 2 else []

    try:
        yield until(ports, "both ranks to start", _START_SECONDS)
    finally:
        running.send_signal(signal.SIGINT)
        try:
            running.wait(300)
        finally:
            running.kill()
            log.close()


@contextlib.contextmanager
def exporter(folder: Path) -> Iterator[int]:
    """The port of a real `mlpipe exporter` over the store in `folder`."""
    process = Cli(folder).start("exporter", "--port", "0", "--interval", "1", stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        url = process.stdout.readline()
        yield int(url.rpartition(":")[2].partition("/")[0])
    finally:
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(300) == 0
        finally:
            process.kill()
            process.communicate()
