"""A real Prometheus with the committed rules over a real 2-rank run: every query of every board has data.

Real: Prometheus (this machine's, and a 3.x where `kit.prometheus build-3` made one), Alertmanager, the run
(torchrun on gloo, CPU), its /metrics and the exporter. Made up: the labels that a PodMonitor adds, and the
series of DCGM's exporter and of NVML, whose names and labels follow their documentation; they are there so
that the GPU panels' queries run, not to say what a GPU does. The alerts are raised with `for` cut to 5 s:
by faults in real runs, and where that would take an hour by records given to the exporter's own code.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import boards
from kit.boards import GPU_ONLY_ALERTS, RULES
from kit.command_runs import Cli, until
from kit.prometheus import Prometheus, alertmanager, alerts_at, build, path_3, prometheus, tool
from kit.servers import ServerMissingError, free_port
from kit.synthetic_run import step_record

from mlpipe.observe.metrics import RankMetrics, start_metrics

pytestmark = pytest.mark.services
ONLY_FAILED_ALERTS = {"MlpipeLossNotFinite", "MlpipeJobFailed"}  # nothing to watch in a run that is well
RUN = "paced-20261121-100000-ab12"
_START_SECONDS = 240  # of a run of seconds, on a machine that others use too
_DATA_SECONDS = 60


@pytest.fixture(autouse=True, scope="module")
def _needs_servers():
    try:
        build()  # unpacks two small packages where the machine has neither program
    except ServerMissingError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def real_run(
    folder: Path, run: str = RUN, sample_seconds: float = 0.0, every: int = 20, **model: Any
) -> Iterator[list[int]]:
    """Two ranks that step until they are told to stop, ten times a second where data comes at once; the ports
    of their /metrics. `model`: further arguments of the model."""
    pytest.importorskip("torch", reason="torch is missing: make install")
    cli = Cli(folder)
    cli.env["PYTHONPATH"] = str(Path(__file__).parents[1])
    train: dict[str, Any] = {
        "model": {"entry": "kit.paced:build_model", "args": {"seconds": 0.1, **model}, "seq_len": 32},
        "data": {"entry": "kit.paced:build_dataset", "args": {"seconds": sample_seconds}, "batch_size": 8},
        "steps": 100_000,
        "strategy": "ddp",
        "checkpoint": {"every": f"{every} steps", "keep": 2},
        "max_restarts": 0,
    }
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
            running.wait(120)
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
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def made_up_dcgm() -> Iterator[int]:
    """Two GPUs of the pods r-0 and r-1, one labelled as with honorLabels true, one as without."""
    fields = {
        "DCGM_FI_DEV_GPU_UTIL": 97, "DCGM_FI_DEV_FB_USED": 61_000, "DCGM_FI_DEV_POWER_USAGE": 640.5,
        "DCGM_FI_DEV_GPU_TEMP": 61, "DCGM_FI_DEV_XID_ERRORS": 0, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.43,
        "DCGM_FI_PROF_DRAM_ACTIVE": 0.37,
    }  # fmt: skip
    gpu = 'Hostname="n0",modelName="NVIDIA H100 80GB HBM3"'
    pods = ('gpu="0",namespace="ml",pod="r-0"', 'gpu="1",exported_namespace="ml",exported_pod="r-1"')
    rest = 'mlpipe_train_gpu_memory_bytes{run="%s",stage="train",rank="0",kind="peak"} 6.1e10\n' % RUN  # noqa: UP031
    nvml = 'run="%s",stage="train",rank="0"' % RUN  # noqa: UP031
    rest += f"mlpipe_gpu_power_watts{{{nvml}}} 640.5\nmlpipe_gpu_temperature_celsius{{{nvml}}} 61\n"
    rest += f'mlpipe_gpu_throttled{{{nvml},reason="thermal"}} 0\n'
    body = rest + "".join(
        f"{name}{{{gpu},{pod}}} {value}\n" for name, value in fields.items() for pod in pods
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("run")
    with (
        prometheus(tmp_path_factory.mktemp("prometheus") / "server", rules=RULES) as server,
        made_up_dcgm() as gpus,
        real_run(folder) as ports,
    ):
        server.scrape([gpus])
        for i, port in enumerate(ports):
            server.scrape([port], namespace="ml", pod=f"r-{i}", node=f"node-{i}")
        saved = f'mlpipe_checkpoint_duration_seconds_count{{run="{RUN}"}} > 1'
        until(lambda: server.query(saved), "two checkpoints", _DATA_SECONDS)
        with exporter(folder) as port:
            server.scrape([port], namespace="ml")
            server.folder = folder
            if not path_3().exists():
                yield server
                return
            beside = tmp_path_factory.mktemp("prometheus") / "server-3"
            with prometheus(beside, rules=RULES, program=path_3(), targets=server.targets) as server.other:
                yield server


def has_data(server: Prometheus, expr: str) -> bool:
    return any(math.isfinite(float(sample["value"][1])) for sample in server.query(expr))


def needs_data(server: Prometheus, expr: str) -> None:
    until(lambda: has_data(server, expr), f"data from {expr}", _DATA_SECONDS)
    if (other := server.other) is not None:
        until(lambda: has_data(other, expr), f"data from {expr} in Prometheus 3", _DATA_SECONDS)


@pytest.mark.parametrize(
    "query",
    [pytest.param(one, id=f"{one.board}: {one.panel}: {one.legend}") for one in boards.queries()],
)
def test_every_query_of_every_panel_has_data(live, query):
    needs_data(live, query.filled(run=RUN))


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(one, id=f"{one.board}: {one.panel}")
        for one in boards.events()
        if "ALERTS" not in one.expr
    ],
)
def test_every_annotation_has_data(live, query):
    needs_data(live, query.filled(run=RUN))


@pytest.mark.parametrize("rule", boards.rules(), ids=lambda rule: rule.get("alert") or rule.get("record"))
def test_every_rule_has_data(live, rule):
    if "record" in rule:
        needs_data(live, rule["record"])
    elif rule["alert"] not in GPU_ONLY_ALERTS | ONLY_FAILED_ALERTS:
        needs_data(live, boards.without_threshold(rule["expr"]))


@pytest.mark.parametrize("name", boards.BOARDS)
def test_every_variable_of_a_board_has_values(live, name):
    for variable in boards.load(name)["templating"]["list"][1:]:
        series, _, label = variable["query"].removeprefix("label_values(").removesuffix(")").rpartition(", ")
        expr = boards.Query(name, "", "", series).filled()
        assert {sample["metric"].get(label) for sample in live.query(expr)} - {None, ""}, variable["query"]


def test_no_alert_fires_on_a_run_that_is_well(live):
    assert live.firing() == {}


def test_monitor_up_scrapes_the_runs_of_this_machine_and_ends_on_ctrl_c(live, tmp_path):
    """On the run that `live` watches, with a Prometheus that mlpipe starts."""
    assert live.folder is not None
    cli, port = Cli(live.folder), free_port()
    cli.env["PATH"] = f"{tool('prometheus').parent}:{cli.env['PATH']}"
    arguments = ("monitor", "up", "--folder", str(tmp_path), "--port", str(port), "--interval", "1")
    process = cli.start(*arguments, "--output", "json")
    try:
        mine = Prometheus(f"http://127.0.0.1:{port}", tmp_path / "targets.json")
        until(lambda: process.poll() is not None or mine.is_ready(), "a Prometheus", _DATA_SECONDS)
        assert process.poll() is None, process.communicate()
        for expr in ("count(mlpipe_train_world_size) == 2", 'mlpipe_fleet_runs{state="running"} == 1'):
            needs_data(mine, expr)
        refused = cli(*arguments, code=4)
        assert "choose another one with --port" in refused.stderr
    finally:
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["url"] == mine.url
    assert not mine.is_ready()


# The alerts, by records given to the exporter.


class Ranks:
    """Two ranks of a run whose steps are fed to the exporter ten times a second, changed by `fault`."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.fault: dict[str, Any] = {}
        self.ranks: list[RankMetrics] = []
        for rank in range(2):
            metrics = start_metrics(run=run, stage="train", rank=rank, port=0)
            assert metrics is not None
            start = {"kind": "start", "world_size": 2, "steps": 1000, "start_step": 0, "device": "cpu"}
            metrics.observe({**start, "num_flops_per_token": 1e7, "peak_flops": 1e11, "time": time.time()})
            self.ranks.append(metrics)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _feed(self) -> None:
        rng, step = random.Random(0), 0
        while not self._over.wait(0.1):
            step += 1
            for rank, metrics in enumerate(self.ranks):
                record = {"kind": "step", "time": time.time(), **step_record(step, rank, 2, rng)}
                metrics.observe({**record, **self.fault})

    def close(self) -> None:
        self._over.set()
        self._thread.join(10)
        for metrics in self.ranks:
            metrics.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[tuple[Prometheus, str]]:
    """Prometheus with the rules, `for` cut to 5 s, and the Alertmanager that it tells."""
    rules = yaml.safe_load(RULES.read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "5s"  # not less: two ranks are not scraped at the same moment
    folder = tmp_path_factory.mktemp("watched")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    with (
        alertmanager(folder / "alertmanager") as url,
        prometheus(folder / "prometheus", rules=folder / "rules.yaml", alertmanager=url) as server,
    ):
        yield server, url


def starved(ranks: Ranks) -> None:
    ranks.fault = {"data_seconds": 0.2, "seconds": 0.4}


def stalled(ranks: Ranks) -> None:
    ranks.fault = {"time": time.time() - 3000}


def failed_save(ranks: Ranks) -> None:
    ranks.ranks[0].observe({"kind": "checkpoint", "stall_seconds": 0.1, "error": "the store does not answer"})


def stale_save(ranks: Ranks) -> None:
    saved = {"kind": "checkpoint", "bytes": 1, "stall_seconds": 0.1, "save_seconds": 1.0}
    ranks.ranks[0].observe({**saved, "time": time.time() - 4000})


def killed(ranks: Ranks) -> None:
    ranks.ranks[1].close()


FAULTS = {
    "MlpipeDataStarved": starved,
    "MlpipeTrainingStalled": stalled,
    "MlpipeCheckpointFailing": failed_save,
    "MlpipeCheckpointStale": stale_save,
    "MlpipeRankNotScraped": killed,
}


@pytest.mark.parametrize("alert", FAULTS)
def test_the_alert_of_a_fault_reaches_the_alertmanager_and_no_other(watched, alert):
    server, url = watched
    ranks = Ranks(f"fault-{alert.lower()}")
    try:
        server.scrape([metrics.port for metrics in ranks.ranks])
        tokens = f'run:mlpipe_train_tokens:rate5m{{run="{ranks.run}"}}'
        until(lambda: has_data(server, tokens), "the run to be seen", _DATA_SECONDS)
        assert alerts_at(url, ranks.run) == {}
        FAULTS[alert](ranks)
        until(lambda: alerts_at(url, ranks.run), f"{alert} at the Alertmanager", _DATA_SECONDS)
        assert set(alerts_at(url, ranks.run)) == {alert}
        notes = alerts_at(url, ranks.run)[alert]["annotations"]
        assert ranks.run in notes["summary"]
        assert notes["runbook_url"] == f"docs/runbooks/{alert}.md"
    finally:
        ranks.close()


def names(url: str, run: str) -> set[str]:
    return set(alerts_at(url, run))


def test_faults_of_a_real_run_a_slow_rank_then_a_store_that_takes_nothing_then_a_nan(watched, tmp_path):
    server, url = watched
    run, poison = "slow-20261121-100000-ab12", tmp_path / "poison"
    with (
        real_run(tmp_path, run, every=60, slow=1, poison=str(poison)) as ports,
        exporter(tmp_path) as port,
    ):
        server.scrape([*ports, port])
        until(lambda: alerts_at(url, run), "an alert about the slow rank", _DATA_SECONDS)
        assert names(url, run) == {"MlpipeStraggler"}
        assert alerts_at(url, run)["MlpipeStraggler"]["labels"]["rank"] == "1"
        checkpoints = tmp_path / "store/runs" / run / "stages/train/checkpoints"
        until(checkpoints.exists, "a checkpoint", _DATA_SECONDS)
        checkpoints.rename(tmp_path / "kept")
        checkpoints.touch()  # a file: nothing can be written below it
        until(lambda: len(names(url, run)) > 1, "an alert about the store", _DATA_SECONDS)
        assert names(url, run) == {"MlpipeStraggler", "MlpipeCheckpointFailing"}
        checkpoints.unlink()
        (tmp_path / "kept").rename(checkpoints)
        poison.touch()
        until(lambda: "MlpipeLossNotFinite" in names(url, run), "an alert about the loss", _DATA_SECONDS)
        assert names(url, run) <= {"MlpipeStraggler", "MlpipeCheckpointFailing", "MlpipeLossNotFinite"}


def test_faults_of_a_real_run_a_starved_loader_then_a_killed_worker(watched, tmp_path):
    server, url = watched
    run = "starved-20261121-100000-ab12"
    with (
        real_run(tmp_path, run, sample_seconds=0.1) as ports,  # 0.4 s a batch of each rank
        exporter(tmp_path) as port,
    ):
        server.scrape([*ports, port])
        until(lambda: alerts_at(url, run), "an alert about the loader", _DATA_SECONDS)
        assert names(url, run) == {"MlpipeDataStarved"}
        record = (tmp_path / "store/runs" / run / "stages/train/attempt-1/records/rank-1.jsonl").read_text()
        os.kill(json.loads(record.partition("\n")[0])["pid"], signal.SIGKILL)
        until(lambda: "MlpipeJobFailed" in names(url, run), "an alert about the run", _DATA_SECONDS)
        assert alerts_at(url, run)["MlpipeJobFailed"]["labels"]["cause"] == "infrastructure"
        assert names(url, run) <= {"MlpipeDataStarved", "MlpipeJobFailed"}
