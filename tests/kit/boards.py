"""The committed boards and rules, as the tests read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
BOARDS = {path.stem: path for path in sorted((ROOT / "grafana" / "dashboards").glob("*.json"))}
RULES = ROOT / "grafana" / "rules" / "mlpipe.yaml"

# Panels (board, title) and alerts that have no data without a GPU. All others must have some on any machine.
GPU_ONLY_PANELS = frozenset(
    {
        ("run", "Peak GPU memory of each rank"),
        ("run", "Tensor cores active"),
        ("run", "GPU power"),
        ("run", "GPU power by rank"),
        ("run", "GPU temperature by rank"),
        ("run", "GPU throttled"),
        ("nodes", "GPU utilization"),
        ("nodes", "Tensor cores active by GPU"),
        ("nodes", "Memory bus active"),
        ("nodes", "GPU memory used"),
        ("nodes", "GPU temperature"),
        ("nodes", "Power of each GPU"),
        ("nodes", "Last XID error"),
    }
)
GPU_ONLY_ALERTS = frozenset({"MlpipeGpuXid"})
# of elastic trainings and of models with experts: a run that is neither has no data for them
OF_SOME_PANELS = frozenset(
    {
        ("run", "Loss scale of fp16"),
        ("run", "Steps that fp16 skipped"),
        ("run", "Times less is sent"),
        ("run", "Time that compress saves, at most"),
        ("run", "Nodes of an elastic training"),
        ("run", "Load of the fullest expert of each layer"),
        ("run", "Experts by load"),
        ("run", "Dropped by full experts"),
    }
)
# watch nothing where all is well
ONLY_FAILED_PANELS = frozenset({("fleet", "Runs that nobody drives")})
ONLY_FAILED_ALERTS = frozenset(
    {"MlpipeLossNotFinite", "MlpipeJobFailed", "MlpipeRunUndriven", "MlpipeExporterMissing"}
)


@dataclass(frozen=True)
class Query:
    board: str
    panel: str
    legend: str
    expr: str

    @property
    def gpu_only(self) -> bool:
        return (self.board, self.panel) in GPU_ONLY_PANELS

    @property
    def of_some(self) -> bool:
        return (self.board, self.panel) in OF_SOME_PANELS

    @property
    def only_failed(self) -> bool:
        return (self.board, self.panel) in ONLY_FAILED_PANELS or self.panel == "annotation Fallback"

    def filled(self, run: str = ".*") -> str:
        """With the variables of Grafana as it fills them in for a board that shows everything."""
        values = {"__rate_interval": "1m", "__range": "10m", "namespace": ".*", "node": ".*", "run": run}
        return re.sub(r"\$([a-z_]+)", lambda found: values[found[1]], self.expr)


def load(board: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARDS[board].read_text())
    return loaded


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All but the rows' headings, those inside a row too."""
    for panel in board["panels"]:
        if panel["type"] != "row":
            yield panel
        yield from panels(panel) if "panels" in panel else ()


def queries() -> list[Query]:
    return [
        Query(name, panel["title"], target["legendFormat"], target["expr"])
        for name in BOARDS
        for panel in panels(load(name))
        for target in panel["targets"]
    ]


def events() -> list[Query]:
    """The annotations of all boards."""
    return [
        Query(name, f"annotation {one['name']}", "", one["target"]["expr"])
        for name in BOARDS
        for one in load(name)["annotations"]["list"]
    ]


def variables() -> list[Query]:
    """What the boards' variables take their values from."""
    return [
        Query(
            name, f"variable {one['name']}", "", re.sub(r"label_values\((.*), (\w+)\)", r"\1", one["query"])
        )
        for name in BOARDS
        for one in load(name)["templating"]["list"]
        if one["type"] == "query"
    ]


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def alerts() -> list[dict[str, Any]]:
    return [rule for rule in rules() if "alert" in rule]


def without_threshold(expr: str) -> str:
    """An alert's expression up to its last comparison: what it watches, whether it fires or not."""
    return re.split(r"\s(?:<|>)\s(?!.*\s(?:<|>)\s)", expr, flags=re.S)[0]
