"""`python -m benchmarks.scrape`: a real Prometheus over a synthetic load of many ranks: series, scrape time
and the time of every panel's query.

One server plays all ranks: the text of each is what mlpipe's own exporter code serves, with the counters
grown by the clock. Prometheus, its scrapes, its rules and its queries are real. Needs `prometheus` in PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from benchmarks import measure
from mlpipe._core.record_lines import parse
from mlpipe.observe import scrape
from mlpipe.observe.metrics import RankMetrics

_PORT = 19090
_GROWS = re.compile(r"^(mlpipe_\w+_total\{[^}]*\}|mlpipe_\w+_(?:sum|count|bucket)\{[^}]*\}) (\S+)$", re.M)


def template(run: str, rank: int) -> str:
    """/metrics of one rank after a start, a step and a save; GROW stands behind what a counter counts."""
    from prometheus_client import CollectorRegistry, generate_latest

    metrics = RankMetrics(run, "train", rank)
    start = {
        "kind": "start",
        "strategy": "fsdp",
        "world_size": 1000,
        "precision": "bf16",
    }
    start |= {
        "device_type": "cuda",
        "num_flops_per_token": 5e10,
        "peak_flops": 9.89e14,
        "steps": 100_000,
        "start_step": 0,
    }
    step = {"kind": "step", "step": 100, "loss": 2.5, "grad_norm": 0.5, "lr": 1e-4, "tokens": 8192}
    step |= {"seconds": 1.0, "data_seconds": 0.01, "compute_seconds": 0.9, "collective_seconds": 0.05}
    step |= {"mfu_ratio": 0.4, "memory_bytes": 60_000_000_000, "time": time.time()}
    saved = {"kind": "checkpoint", "bytes": 10**9, "stall_seconds": 0.1, "save_seconds": 20.0}
    for line in (start, step, saved):
        record = parse({"time": time.time(), **line})
        assert record is not None
        metrics.observe(record)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    return _GROWS.sub(r"\1 GROW\2", generate_latest(registry).decode())


class Ranks(ThreadingHTTPServer):
    """All ranks behind one port, by path."""

    request_queue_size = 512
    daemon_threads = True

    def __init__(self, num_runs: int, num_ranks: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        one = {rank: template("RUN", rank) for rank in (0, 1)}
        self.began = time.time()
        self.texts = {
            f"/{run}/{rank}": one[min(rank, 1)]
            .replace('run="RUN"', f'run="run-{run}"')
            .replace('rank="1"', f'rank="{rank}"')
            for run in range(num_runs)
            for rank in range(num_ranks)
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        steps = time.time() - self.server.began
        text = re.sub(
            r"GROW(\S+)", lambda found: str(float(found[1]) * steps), self.server.texts[self.path]
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten ranks of two runs, ten seconds")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=measure.RESULTS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.runs, arguments.ranks, arguments.seconds, arguments.interval = 2, 10, 10.0, 2.0
    load_before = os.getloadavg()[0]
    server = Ranks(arguments.runs, arguments.ranks)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        scrape.write_prometheus(folder, interval_seconds=arguments.interval)
        port = server.server_address[1]
        groups = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"__metrics_path__": path, "path": path, "namespace": "ml"},
            }
            for path in server.texts
        ]
        scrape.write(folder / "targets.json", json.dumps(groups))
        found = watch(folder, arguments.seconds)
    found |= {"runs": arguments.runs, "ranks": arguments.ranks, "interval_seconds": arguments.interval}
    body = measure.document(rows_of(found), load_before=load_before, **found)
    measure.publish("scrape", body, arguments.results)
    return 0


def rows_of(found: dict) -> list[dict]:
    work = f"Prometheus over {found.get('targets_up', 0):,.0f} ranks"
    return [
        measure.alone(work, "series", "1", [found["num_series"]]),
        measure.alone(work, "scrape of a rank, 99 %", "s", [found["scrape_seconds_p99"]]),
        measure.alone(work, "memory of Prometheus", "MiB", [found["prometheus_memory_bytes"] / 2**20]),
        measure.alone(work, "query of a panel, median", "s", [found["query_seconds"]["median"]]),
        measure.alone(work, "query of a panel, slowest", "s", [found["query_seconds"]["max"]]),
    ]


def watch(folder: Path, seconds: float) -> dict:
    argv = ["prometheus", "--config.file=prometheus.yml", "--storage.tsdb.path=data"]
    argv += [f"--web.listen-address=127.0.0.1:{_PORT}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.5)
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text()[-2000:])
        status = Path(f"/proc/{process.pid}/status").read_text()
        took = {f"{board}: {title}": timed(expr) for board, title, expr in queries()}
        slow = sorted(took.items(), key=lambda pair: -pair[1])
        return {
            "num_series": count('count({__name__=~".+"})'),
            "targets_up": count("sum(up)"),
            "scrape_seconds_p99": count("quantile(0.99, scrape_duration_seconds)"),
            "samples_scraped": count("sum(scrape_samples_scraped)"),
            "prometheus_memory_bytes": int(re.search(r"VmRSS:\s+(\d+)", status)[1]) * 1024,
            "query_seconds": {
                "median": statistics.median(took.values()),
                "max": slow[0][1],
                "slowest": slow[0][0],
            },
            "queries": took,
        }
    finally:
        process.terminate()
        process.wait(60)


def queries() -> list[tuple[str, str, str]]:
    """(board, panel, PromQL) of every panel, its variables filled as for a board that shows everything."""
    values = {"__rate_interval": "2m", "__range": "10m", "namespace": ".*", "node": ".*", "run": ".*"}
    found = []
    for path in sorted(scrape.BOARDS.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = re.sub(r"\$([a-z_]+)", lambda name: values[name[1]], target["expr"])
                found.append((path.stem, f"{panel['title']} {target['legendFormat']}", expr))
    return found


def ask(expr: str) -> float | None:
    url = f"http://127.0.0.1:{_PORT}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    with urllib.request.urlopen(url, timeout=120) as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def count(expr: str) -> float:
    return ask(expr) or 0.0


def timed(expr: str) -> float:
    began = time.perf_counter()
    ask(expr)
    return time.perf_counter() - began


if __name__ == "__main__":
    raise SystemExit(main())
