"""What a Prometheus of this machine needs: its configuration, where the ranks of local runs listen, and the
files with which a Grafana finds it and the boards. No process is started here."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mlpipe._core.files import write_whole
from mlpipe._core.records import Start
from mlpipe.observe.records import Follower, list_ranks
from mlpipe.store.base import Store
from mlpipe.store.runs import RunState

RULES = Path(__file__).with_name("rules") / "mlpipe.yaml"
BOARDS = Path(__file__).with_name("dashboards")


class Targets:
    """Ports of the ranks that train on this machine, by their start records; a restart moves them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ranks: dict[str, tuple[Follower, int | None]] = {}

    def find(self, under_way: Iterable[RunState]) -> list[int]:
        """Of these runs, ascending. Raises StoreError when the store cannot be listed."""
        ports = []
        seen: set[str] = set()
        for run in under_way:
            for name, stage in run.stages.items():
                if stage.state != "running":
                    continue
                key = run.attempt_key(name)
                for rank in list_ranks(self._store, key):
                    place = f"{key}/{rank}"
                    seen.add(place)
                    port = self._port(place, key, rank)
                    if port:
                        ports.append(port)
        self._ranks = {place: known for place, known in self._ranks.items() if place in seen}
        return sorted(ports)

    def _port(self, place: str, key: str, rank: int) -> int | None:
        tail, port = self._ranks.get(place) or (Follower(self._store, key, rank), None)
        for record in tail.poll():
            if isinstance(record, Start):
                port = record.metrics_port if record.host == socket.gethostname() else None
        self._ranks[place] = (tail, port)
        return port


def write_targets(folder: Path, ports: list[int], exporter_port: int) -> None:
    """targets.json, which Prometheus reads again when it changes."""
    groups = [{"targets": [f"127.0.0.1:{port}" for port in (*ports, exporter_port)]}]
    write_whole(folder / "targets.json", json.dumps(groups, indent=1))


def write_prometheus(folder: Path, *, interval_seconds: float) -> None:
    """prometheus.yml and the rules beside it. JSON is YAML."""
    interval = f"{interval_seconds:g}s"
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [
            {
                "job_name": "mlpipe",
                "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": interval}],
            }
        ],
    }
    write_whole(folder / "prometheus.yml", json.dumps(config, indent=1))
    write_whole(folder / "rules.yaml", RULES.read_text())


def write_grafana(folder: Path, url: str) -> Path:
    """Provisioning of Grafana: start it with GF_PATHS_PROVISIONING set to the folder that is returned."""
    boards = folder / "grafana" / "dashboards"
    boards.mkdir(parents=True, exist_ok=True)
    for path in sorted(BOARDS.glob("*.json")):
        shutil.copyfile(path, boards / path.name)
    source = {"name": "mlpipe", "type": "prometheus", "access": "proxy", "url": url, "isDefault": True}
    provider = {
        "name": "mlpipe",
        "folder": "mlpipe",
        "type": "file",
        "options": {"path": str(boards.absolute())},
    }
    provisioning = folder / "grafana" / "provisioning"
    for kind, body in (("datasources", source), ("providers", provider)):
        place = provisioning / ("dashboards" if kind == "providers" else kind) / "mlpipe.yaml"
        write_whole(place, json.dumps({"apiVersion": 1, kind: [body]}, indent=1))
    return provisioning
