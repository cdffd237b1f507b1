"""A real Prometheus with the committed rules over a real 2-rank run: every query of every board has data.

Real: Prometheus (this machine's, and a 3.x where `kit.prometheus build-3` made one), the run (torchrun on
gloo, CPU), its /metrics and the exporter. Made up: the labels that a PodMonitor adds, the series of
DCGM's exporter and of NVML, named as their documentation says, and those of a model with experts, of fp16
and of an elastic training, which this run is not; they are there so that the queries of these panels run, not
to say what a GPU or an expert does. The alerts are in test_alerts.py.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kit import boards
from kit.boards import GPU_ONLY_ALERTS, ONLY_FAILED_ALERTS, RULES
from kit.command_runs import Cli, until
from kit.paced_run import DATA_SECONDS, RUN, exporter, real_run
from kit.prometheus import Prometheus, has_data, path_3, prometheus, tool
from kit.servers import free_port

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("prometheus_programs")]


@contextlib.contextmanager
def made_up_series() -> Iterator[int]:
    """Two GPUs of the pods r-0 and r-1, one labelled as with honorLabels true, one as without; a layer of
    experts; replicas."""
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
    # of rank 0, as `observe/metrics.py` has them
    rest += f'mlpipe_train_expert_max_load_ratio{{{nvml},layer="0"}} 1.6\n'
    rest += f'mlpipe_train_expert_max_average_load_ratio{{{nvml},layer="0"}} 1.2\n'
    rest += f'mlpipe_train_experts_by_load_ratio{{{nvml},at_most="1.5"}} 3\n'
    rest += f"mlpipe_train_expert_dropped_ratio{{{nvml}}} 0.1\nmlpipe_train_replicas{{{nvml}}} 3\n"
    rest += f"mlpipe_train_loss_scale{{{nvml}}} 65536\nmlpipe_train_skipped_steps_total{{{nvml}}} 2\n"
    body = rest + "".join(
        f"{name}{{{gpu},{pod}}} {value}\n" for name, value in fields.items() for pod in pods
    )

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            sent = time.monotonic()  # grows, as its quotient is of rates
            grows = f"mlpipe_train_exchanged_bytes_total{{{nvml}}} {sent}\n"
            grows += f"mlpipe_train_exchanged_plain_bytes_total{{{nvml}}} {4 * sent}\n"
            self.wfile.write((body + grows).encode())

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
        made_up_series() as gpus,
        real_run(folder, validates=True) as ports,
    ):
        server.scrape([gpus])
        for i, port in enumerate(ports):
            server.scrape([port], namespace="ml", pod=f"r-{i}", node=f"node-{i}")
        saved = f'mlpipe_checkpoint_duration_seconds_count{{run="{RUN}"}} > 1'
        until(lambda: server.query(saved), "two checkpoints", DATA_SECONDS)
        with exporter(folder) as port:
            server.scrape([port], namespace="ml")
            server.folder = folder
            if not path_3().exists():
                yield server
                return
            beside = tmp_path_factory.mktemp("prometheus") / "server-3"
            with prometheus(beside, rules=RULES, program=path_3(), targets=server.targets) as server.other:
                yield server


def needs_data(server: Prometheus, expr: str) -> None:
    until(lambda: has_data(server, expr), f"data from {expr}", DATA_SECONDS)
    if (other := server.other) is not None:
        until(lambda: has_data(other, expr), f"data from {expr} in Prometheus 3", DATA_SECONDS)


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(one, id=f"{one.board}: {one.panel}: {one.legend}")
        for one in boards.queries()
        if not one.only_failed
    ],
)
def test_every_query_of_every_panel_has_data(live, query):
    needs_data(live, query.filled(run=RUN))


@pytest.mark.parametrize(
    "query",
    [
        pytest.param(one, id=f"{one.board}: {one.panel}")
        for one in boards.events()
        if "ALERTS" not in one.expr and not one.only_failed
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
        until(lambda: process.poll() is not None or mine.is_ready(), "a Prometheus", DATA_SECONDS)
        assert process.poll() is None, process.communicate()
        for expr in ("count(mlpipe_train_world_size) == 2", 'mlpipe_fleet_runs{state="running"} == 1'):
            needs_data(mine, expr)
        refused = cli(*arguments, code=4)
        assert "choose another one with --port" in refused.stderr
    finally:
        process.send_signal(signal.SIGINT)
        try:
            out, _ = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0
    assert json.loads(out)["url"] == mine.url
    assert not mine.is_ready()
