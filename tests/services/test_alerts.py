"""The alerts in a real Prometheus and Alertmanager, with `for` cut to 5 s: by faults in real runs, and where
that would take an hour by records given to the exporter's own code."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kit import boards
from kit.boards import RULES
from kit.command_runs import until
from kit.paced_run import DATA_SECONDS, exporter, real_run
from kit.prometheus import Prometheus, alertmanager, alerts_at, has_data, hasty_rules, prometheus
from kit.synthetic_run import step_record

from mlpipe._core.record_lines import parse
from mlpipe.observe.metrics import RankMetrics, start_metrics
from mlpipe.store import runs
from mlpipe.store.folder import FolderStore

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("prometheus_programs")]


class Ranks:
    """Two ranks of a run whose steps are fed to the exporter ten times a second, changed by `fault`."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.fault: dict[str, Any] = {}
        self.ranks: list[RankMetrics] = []
        for rank in range(2):
            metrics = start_metrics(RankMetrics(run, "train", rank), 0)
            assert metrics is not None
            start = {"kind": "start", "world_size": 2, "steps": 1000, "start_step": 0, "device": "cpu"}
            metrics.observe(
                parse({**start, "num_flops_per_token": 1e7, "peak_flops": 1e11, "time": time.time()})
            )
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
                metrics.observe(parse({**record, **self.fault}))

    def close(self) -> None:
        self._over.set()
        self._thread.join(300)
        for metrics in self.ranks:
            metrics.close()


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Iterator[tuple[Prometheus, str]]:
    """Prometheus with the rules, `for` cut to 5 s, and the Alertmanager that it tells."""
    folder = tmp_path_factory.mktemp("watched")
    rules = hasty_rules(RULES, folder)
    with (
        alertmanager(folder / "alertmanager") as url,
        prometheus(folder / "prometheus", rules=rules, alertmanager=url) as server,
    ):
        yield server, url


def starved(ranks: Ranks) -> None:
    ranks.fault = {"data_seconds": 0.2, "seconds": 0.4}


def stalled(ranks: Ranks) -> None:
    ranks.fault = {"time": time.time() - 3000}


def failed_save(ranks: Ranks) -> None:
    failed = {"kind": "checkpoint", "time": time.time(), "stall_seconds": 0.1}
    ranks.ranks[0].observe(parse({**failed, "error": "the store does not answer"}))


def stale_save(ranks: Ranks) -> None:
    saved = {"kind": "checkpoint", "bytes": 1, "stall_seconds": 0.1, "save_seconds": 1.0}
    ranks.ranks[0].observe(parse({**saved, "time": time.time() - 4000}))


def killed(ranks: Ranks) -> None:
    ranks.ranks[1].close()


FAULTS = {
    "MlpipeDataStarved": starved,
    "MlpipeTrainingStalled": stalled,
    "MlpipeCheckpointFailing": failed_save,
    "MlpipeCheckpointStale": stale_save,
    "MlpipeRankNotScraped": killed,
}


def test_the_alert_of_each_fault_reaches_the_alertmanager_and_no_other(watched):
    """Each of a run of its own; all runs at once, since what takes time is to wait."""
    server, url = watched
    with contextlib.ExitStack() as stack:
        runs_of = {}
        for alert in FAULTS:
            ranks = runs_of[alert] = Ranks(f"fault-{alert.lower()}")
            stack.callback(ranks.close)
            server.scrape([metrics.port for metrics in ranks.ranks])
        for ranks in runs_of.values():
            tokens = f'run:mlpipe_train_tokens:rate5m{{run="{ranks.run}"}}'
            until(lambda tokens=tokens: has_data(server, tokens), "the run to be seen", DATA_SECONDS)
            assert alerts_at(url, ranks.run) == {}
        for alert, ranks in runs_of.items():
            FAULTS[alert](ranks)
        for alert, ranks in runs_of.items():
            until(lambda run=ranks.run: alerts_at(url, run), f"{alert} at the Alertmanager", DATA_SECONDS)
        for alert, ranks in runs_of.items():
            assert set(alerts_at(url, ranks.run)) == {alert}
            notes = alerts_at(url, ranks.run)[alert]["annotations"]
            assert ranks.run in notes["summary"]
            assert notes["runbook_url"] == f"docs/runbooks/{alert}.md"


def names(url: str, run: str) -> set[str]:
    return set(alerts_at(url, run))


def test_faults_of_a_real_run_a_slow_rank_then_a_store_that_takes_nothing_then_a_nan(watched, tmp_path):
    server, url = watched
    run, poison = "slow-20261121-100000-ab12", tmp_path / "poison"
    with (
        real_run(tmp_path, run, every=20, seconds=0.3, slow=1, poison=str(poison)) as ports,
        exporter(tmp_path) as port,
    ):
        server.scrape([*ports, port])
        until(lambda: alerts_at(url, run), "an alert about the slow rank", DATA_SECONDS)
        assert names(url, run) == {"MlpipeStraggler"}
        assert alerts_at(url, run)["MlpipeStraggler"]["labels"]["rank"] == "1"
        checkpoints = tmp_path / "store/runs" / run / "stages/train/checkpoints"
        until(checkpoints.exists, "a checkpoint", DATA_SECONDS)
        checkpoints.rename(tmp_path / "kept")
        checkpoints.touch()  # a file: nothing can be written below it
        until(lambda: len(names(url, run)) > 1, "an alert about the store", DATA_SECONDS)
        assert names(url, run) == {"MlpipeStraggler", "MlpipeCheckpointFailing"}
        checkpoints.unlink()
        (tmp_path / "kept").rename(checkpoints)
        poison.touch()
        until(lambda: "MlpipeLossNotFinite" in names(url, run), "an alert about the loss", DATA_SECONDS)
        assert names(url, run) <= {"MlpipeStraggler", "MlpipeCheckpointFailing", "MlpipeLossNotFinite"}


def test_faults_of_a_real_run_a_starved_loader_then_a_killed_worker(watched, tmp_path):
    """And of one beside it whose client died before it had a driver."""
    server, url = watched
    run, abandoned = "starved-20261121-100000-ab12", "abandoned-20261121-100000-ab12"
    with (
        real_run(tmp_path, run, sample_seconds=0.2, seconds=0.4) as ports,  # 0.8 s a batch of each rank
        exporter(tmp_path) as port,
    ):
        server.scrape([*ports, port])
        until(lambda: alerts_at(url, run), "an alert about the loader", DATA_SECONDS)
        assert names(url, run) == {"MlpipeDataStarved"}
        record = (tmp_path / "store/runs" / run / "stages/train/attempt-1/records/rank-1.jsonl").read_text()
        os.kill(json.loads(record.partition("\n")[0])["pid"], signal.SIGKILL)
        until(lambda: "MlpipeJobFailed" in names(url, run), "an alert about the run", DATA_SECONDS)
        assert alerts_at(url, run)["MlpipeJobFailed"]["labels"]["cause"] == "infrastructure"
        assert names(url, run) <= {"MlpipeDataStarved", "MlpipeJobFailed"}
        runs.create_run(FolderStore(tmp_path / "store"), abandoned, "", "0" * 64, ["train"], "local", {})
        until(lambda: names(url, abandoned), "an alert about the abandoned run", DATA_SECONDS)
        assert names(url, abandoned) == {"MlpipeRunUndriven"}
        for query in boards.queries():
            if query.only_failed:
                assert has_data(server, query.filled(run=abandoned)), query.panel
