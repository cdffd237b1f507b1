"""Rows against the best peer, and the one file of results into which every part is merged."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import measure

NAME = "peers"


OURS, PEER, CONTROL = "mlpipe", "raw DDP", "raw DDP again"


def against_best(
    work: str, name: str, unit: str, found: list[measure.Round], key: str, *, goal: float | None,
    higher_is_better: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """First the row with the goal, against the best peer by its median; then one against each other peer, and
    the control, both without a goal."""
    peers = [side for side in found[0] if side not in (OURS, CONTROL)]
    medians = {peer: statistics.median(r[peer][key] for r in found) for peer in peers}
    ranked = sorted(peers, key=medians.__getitem__, reverse=higher_is_better)

    def row(label: str, side: str, peer: str, goal: float | None) -> dict[str, Any]:
        return measure.figure(
            work, label, unit, found, key, ours=side, peer=peer, goal=goal, higher_is_better=higher_is_better
        )

    rows = [row(name, OURS, ranked[0], goal)]
    rows += [row(f"{name}, against {peer}", OURS, peer, None) for peer in ranked[1:]]
    return [*rows, row(f"control: {name}", CONTROL, PEER, None)]


def merge(rows: list[dict[str, Any]], folder: Path, **settings: Any) -> Path:
    """Replaces what the file had of the same work; each row keeps settings, commit and time of its run."""
    about = measure.document([], **settings)
    new = {"time": about["time"], "commit": about["commit"], **about["settings"]}
    new["load_before"] = about["machine"]["load_before"]
    path = folder / f"{NAME}.json"
    kept = json.loads(path.read_text())["figures"] if path.exists() else []
    works = {row["work"] for row in rows}
    kept = [row for row in kept if row["work"] not in works]
    return measure.write(NAME, {**about, "figures": kept + [{**row, "run": new} for row in rows]}, folder)
